"""`python -m attend` is the command `attend`."""

from attend.cli import main

main()
