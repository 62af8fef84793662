"""The C extension for short calls, if the package was installed with a C compiler."""

try:
    from service.attention.native import _short
except ImportError:
    _short = None  # type: ignore[assignment]

extension = _short  # None without a compiler
TORCH = "torch"  # what computes short calls then


def variant() -> str:
    """What computes short calls here: an instruction set that the extension uses, or TORCH."""
    return TORCH if extension is None else extension.variants[0]
