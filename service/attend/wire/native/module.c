/* The Python module `_numbers`: read() and write(), which release the interpreter's lock for large arrays, and the choice of a variant. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdlib.h>
#include <string.h>
#include "numbers.h"

#define LARGE (1 << 14) /* bytes that are worth releasing the lock for */

static PyThreadState *release_lock(Py_ssize_t size) { return size > LARGE ? PyEval_SaveThread() : NULL; }

static void take_lock(PyThreadState *state)
{
    if (state) PyEval_RestoreThread(state);
}

static PyObject *variants(PyObject *self, PyObject *arguments)
{
    (void)self, (void)arguments;
    PyObject *names = PyList_New(0);
    for (int i = 0; names && i < VARIANTS; i++) {
        PyObject *name = can_run(i) ? PyUnicode_FromString(VARIANT_NAMES[i]) : NULL;
        if (name && PyList_Append(names, name)) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    if (PyErr_Occurred()) Py_CLEAR(names);
    return names;
}

static PyObject *use(PyObject *self, PyObject *name)
{
    (void)self;
    for (int i = 0; i < VARIANTS; i++) {
        if (!PyUnicode_Check(name) || PyUnicode_CompareWithASCIIString(name, VARIANT_NAMES[i]) || !can_run(i)) continue;
        variant = i;
        Py_RETURN_NONE;
    }
    return PyErr_Format(PyExc_ValueError, "this processor has no variant %R", name);
}

/* How many numbers are in a list, if it is one. */
static size_t count_numbers(const char *text, size_t size)
{
    size_t count = 1;
    while (size) { /* in blocks whose count fits into a byte, for vector instructions */
        size_t block = size < 255 ? size : 255;
        uint8_t commas = 0;
        for (size_t i = 0; i < block; i++) commas = (uint8_t)(commas + (text[i] == ','));
        count += commas;
        text += block;
        size -= block;
    }
    return count;
}

static PyObject *result_of(PyObject *memory, const list_of_numbers *list)
{
    PyObject *shape = PyTuple_New(list->rank);
    for (int i = 0; shape && i < list->rank; i++) {
        PyObject *length = PyLong_FromSize_t(list->shape[i]);
        if (!length || PyTuple_SetItem(shape, i, length)) Py_CLEAR(shape);
    }
    return shape ? Py_BuildValue("ONi", memory, shape, list->literals) : NULL;
}

static PyObject *read_numbers(PyObject *self, PyObject *arguments)
{
    (void)self;
    PyObject *body;
    Py_ssize_t start, stop, max_lists, size;
    list_of_numbers list;
    char *text;
    if (!PyArg_ParseTuple(arguments, "Snnnp", &body, &start, &stop, &max_lists, &list.is_float32)) return NULL;
    if (PyBytes_AsStringAndSize(body, &text, &size)) return NULL;
    if (start < 0 || stop < start || stop > size || max_lists < 0) return PyErr_Format(PyExc_ValueError, "no such part of the text");
    list.max_lists = (size_t)max_lists;
    PyThreadState *state = release_lock(stop - start);
    list.capacity = count_numbers(text + start, (size_t)(stop - start));
    take_lock(state);
    size_t bytes = list.capacity * (list.is_float32 ? sizeof(float) : sizeof(double));
    PyObject *memory = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)bytes);
    if (!memory) return NULL;
    list.numbers = PyByteArray_AsString(memory);
    state = release_lock(stop - start);
    const char *end = read_list(text, text + start, text + size, &list);
    take_lock(state);
    PyObject *result = end == text + stop && list.count == list.capacity ? result_of(memory, &list) : Py_NewRef(Py_None);
    Py_DECREF(memory);
    return result;
}

static PyObject *write_view(const Py_buffer *view, int decimals)
{
    size_t shape[MAX_RANK];
    if (view->ndim < 1 || view->ndim > MAX_RANK || !view->format || strcmp(view->format, "f") || !view->len) Py_RETURN_NONE;
    for (int i = 0; i < view->ndim; i++) shape[i] = (size_t)view->shape[i];
    char *out = malloc(text_capacity(view->ndim, shape));
    if (!out) return PyErr_NoMemory();
    PyThreadState *state = release_lock(view->len);
    size_t size = write_list(view->buf, view->ndim, shape, decimals, out);
    take_lock(state);
    PyObject *text = PyBytes_FromStringAndSize(out, (Py_ssize_t)size);
    free(out);
    return text;
}

static PyObject *write_numbers(PyObject *self, PyObject *arguments)
{
    (void)self;
    PyObject *array;
    int decimals;
    Py_buffer view;
    if (!PyArg_ParseTuple(arguments, "Oi", &array, &decimals)) return NULL;
    if (decimals < NO_LIMIT || decimals > EXACT_POWER) return PyErr_Format(PyExc_ValueError, "at most %d decimals", EXACT_POWER);
    if (PyObject_GetBuffer(array, &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)) return NULL;
    PyObject *text = write_view(&view, decimals);
    PyBuffer_Release(&view);
    return text;
}

static PyMethodDef METHODS[] = {
    {"read", read_numbers, METH_VARARGS, NULL}, /* described in _numbers.pyi */
    {"write", write_numbers, METH_VARARGS, NULL},
    {"variants", variants, METH_NOARGS, NULL},
    {"use", use, METH_O, NULL},
    {NULL, NULL, 0, NULL}};
static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_numbers", "Numbers as JSON text.", -1, METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__numbers(void)
{
    prepare_numbers();
    PyObject *module = PyModule_Create(&MODULE);
    if (module && (PyModule_AddIntMacro(module, HAS_BOOLEANS) || PyModule_AddIntMacro(module, HAS_MINUS_INFINITY))) Py_CLEAR(module);
    return module;
}
