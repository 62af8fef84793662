"""The file in which a generator keeps what a framework computed: `frameworks/NAME.json`. NumPy alone, from Python 3.8 on.

One file holds one checkpoint and calls on the layers in it:

    {
      "about": what it is,
      "made_by": the script beside this file,
      "versions": {"keras": "3.15.1", …},
      "weights": {name: tensor, …},           as the framework names and lays them out: what is given to PUT /layers/{name}
      "cases": [{
        "about": what this call is,
        "load": {"layout": …, "prefix": …, "spec": {…}},   the query of that PUT; layout null where the names tell it
        "request": {…},                        the fields of POST /attend, tensors among them
        "expect": {"output": tensor, "attention_weights": tensor},   what the framework gave; weights are missing where it shows none
        "tolerance": 1e-5                      largest absolute difference
      }, …]
    }

A tensor is `{"shape": […], "datatype": "FP32", "base64": little-endian row-major bytes}`, as on the wire. Generators draw everything from
`numpy.random.RandomState`, whose streams never change, so that a second run anywhere gives the same file up to rounding in "expect".
`python generate_X.py` writes; `python generate_X.py --check` compares with what is there and exits 1 where they differ.
"""

import base64
import json
import sys
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "frameworks"
NUMPY = {"FP32": "<f4", "FP64": "<f8", "FP16": "<f2", "INT64": "<i8", "BOOL": "?"}


def draw(seed, *shape, scale=1.0):
    """Standard normal float32 numbers times `scale`."""
    return (np.random.RandomState(seed).standard_normal(shape) * scale).astype(np.float32)


def draw_all(seed, shapes, scale=0.5):
    """name -> shape to name -> float32 array; in order of name, so that the framework's own order does not matter."""
    stream = np.random.RandomState(seed)
    return {name: (stream.standard_normal(shapes[name]) * scale).astype(np.float32) for name in sorted(shapes)}


def tensor(array):
    """An array as JSON of the API."""
    array = np.asarray(array)
    name = next(name for name, dtype in NUMPY.items() if np.dtype(dtype) == array.dtype)
    data = np.ascontiguousarray(array, NUMPY[name]).tobytes()
    return {"shape": list(array.shape), "datatype": name, "base64": base64.b64encode(data).decode()}


def array(tensor):
    """An array from JSON of the API."""
    data = base64.b64decode(tensor["base64"])
    return np.frombuffer(data, NUMPY[tensor["datatype"]]).reshape(tensor["shape"])


def case(about, load, request, output, attention_weights=None, tolerance=1e-5):
    """One entry of "cases"; arrays in `request` become tensors, and None is left out."""
    request = {name: tensor(x) if isinstance(x, np.ndarray) else x for name, x in request.items() if x is not None}
    expect = {"output": tensor(output)}
    if attention_weights is not None:
        expect["attention_weights"] = tensor(attention_weights)
    return {
        "about": about,
        "load": {"layout": None, "prefix": "", "spec": {}, **load},
        "request": request,
        "expect": expect,
        "tolerance": tolerance,
    }


def save(name, about, versions, weights, cases):
    """Writes the file, or under --check compares with it."""
    document = {
        "about": about,
        "made_by": Path(sys.argv[0]).name,
        "versions": versions,
        "weights": {key: tensor(value) for key, value in weights.items()},
        "cases": cases,
    }
    path = FOLDER / f"{name}.json"
    if "--check" in sys.argv:
        differences = list(compare(json.loads(path.read_text()), document))
        print(f"{name}: {'; '.join(differences) or 'the same'}")
        if differences:
            sys.exit(1)
        return
    FOLDER.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, separators=(",", ":")) + "\n")
    print(f"{name}: {len(cases)} cases, {path.stat().st_size} bytes")


def compare(old, new):
    """What differs between two documents: names and inputs at all, expectations beyond the tolerance."""
    if old["weights"] != new["weights"]:
        yield "other weights"
    if [x["load"] for x in old["cases"]] != [x["load"] for x in new["cases"]]:
        yield "other layers"
    for before, after in zip(old["cases"], new["cases"]):  # noqa: B905 (Python 3.9 has no strict)
        for part in ("request", "expect"):
            for name in sorted({*before[part], *after[part]}):
                if not _close(before[part].get(name), after[part].get(name), before["tolerance"]):
                    yield f"{after['about']}: other {name}"


def _close(before, after, tolerance):
    if not all(isinstance(one, dict) and "base64" in one for one in (before, after)):
        return before == after
    return before["shape"] == after["shape"] and bool(np.allclose(array(before), array(after), rtol=0, atol=tolerance))
