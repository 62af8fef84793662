#!/usr/bin/env python
"""Fuzz one decoder with atheris, guided by coverage: `python tests/fuzz/run.py json CORPUS -max_total_time=600`.

Not part of the test suite, since atheris is no dependency (`pip install atheris`). Add what it finds as a case to `tests/wire`.
"""

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["attend"]):
    import decoders


def main() -> None:
    """The first argument is the decoder, the second the corpus folder; libFuzzer gets the rest."""
    name, corpus, *rest = sys.argv[1:]
    folder = Path(corpus)
    folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(decoders.SEEDS[name]):
        (folder / f"seed-{number}").write_bytes(seed)
    words = folder.with_suffix(".dict")
    words.write_text("".join(f'"\\"{word}\\""\n' for word in decoders.WORDS))
    atheris.Setup([sys.argv[0], corpus, *rest, f"-dict={words}"], decoders.TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
