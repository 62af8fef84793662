"""`python -m service` is the command `attend`."""

from service.cli import main

main()
