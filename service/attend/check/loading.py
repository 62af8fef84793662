"""Finds the object that a name stands for, in a module or a file, and what can be called of it."""

import inspect
import sys
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name
from types import FunctionType, ModuleType
from typing import Any

from attend.check.arrays import is_module
from attend.check.constructor import constructor_arguments
from attend.check.convention import Convention
from attend.check.weights import multi_head


def as_callable(candidate: Any) -> Any:
    """The candidate; of a `torch.autograd.Function`, or its `apply`, a function with the parameters of its forward pass.

    ValueError: a function that constructs a module.
    """
    if (cls := _autograd_function(candidate)) is None:
        if (made := _constructed_by(candidate)) is not None:
            raise ValueError(f"it is a function that returns a {type(made).__name__}: pass that class, or what it returns for your sizes")
        return candidate
    torch = sys.modules["torch"]
    parameters = [*inspect.signature(cls.forward).parameters.values()]
    has_context = cls.setup_context is torch.autograd.Function.setup_context
    signature = inspect.Signature(parameters[1:] if has_context else parameters)

    def apply(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return cls.apply(*bound.args)

    apply.__signature__ = signature  # type: ignore[attr-defined]  # inspect reads it; a function's type has none
    apply.__module__, apply.__name__ = cls.__module__, cls.__name__
    return apply


def _constructed_by(function: Any) -> Any:
    """The torch module that a function returns whose required parameters are sizes by their names; None if it returns none."""
    with suppress(Exception):  # what takes arrays raises for sizes
        if isinstance(function, FunctionType):
            signature, convention = inspect.signature(function), Convention()
            arguments = constructor_arguments(signature, convention, multi_head(convention.d_model, 3), [], evaluates=True)
            made = function(**arguments) if arguments else None
            return made if is_module(made) else None
    return None


def _autograd_function(candidate: Any) -> Any:
    """The subclass of `torch.autograd.Function` that a candidate is, or whose `apply` it is; None if it is none."""
    cls = candidate if isinstance(candidate, type) else getattr(candidate, "__self__", None)
    torch = sys.modules.get("torch")
    return cls if torch is not None and isinstance(cls, type) and issubclass(cls, torch.autograd.Function) else None


class NoSuchCandidate(ValueError):
    """A name of a wrong pattern, of a missing file, or of nothing in a module."""


def load_candidate(name: str) -> Any:
    """The object that `my_package.my_module:MyAttention` or `path/to/file.py:MyAttention` names. Raises NoSuchCandidate and ImportError."""
    module, _, attribute = name.rpartition(":")
    is_file = module.endswith(".py")
    if not is_file and not all(part.isidentifier() for part in module.split(".")):
        raise NoSuchCandidate(f"expected my_package.my_module:MyAttention or my_file.py:MyAttention, got {name!r}")
    try:
        return attrgetter(attribute)(_import_file(Path(module))) if is_file else resolve_name(name)
    except AttributeError as error:
        raise NoSuchCandidate(f"expected {name!r} to name something: {error}") from None


def _import_file(path: Path) -> ModuleType:
    """The module in this file, which is run once. It finds modules beside it, as a script does."""
    name, folder = str(path.resolve()), str(path.resolve().parent)
    if name not in sys.modules:
        spec = spec_from_file_location(name, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise NoSuchCandidate(f"there is no file {path}")
        if folder not in sys.path:
            sys.path.insert(0, folder)
        module = sys.modules[name] = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
