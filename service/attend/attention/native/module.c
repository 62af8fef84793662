/* The module attend.attention.native._short; _short.pyi says what its functions take and return. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "short.h"

#define CAPSULE "attend.attention.native._short.layer"

enum { MOST_ITEMS = 1 << 20, MOST_ROWS = (1 << 14) - 1, MOST_WIDTH = MOST_ROWS }; /* up to here, sizes in bytes fit into 64 bits */

static void free_layer(PyObject *capsule) { free(PyCapsule_GetPointer(capsule, CAPSULE)); }

static PyObject *make_layer(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer parts[2 * PROJECTIONS];
    int width, heads, variant = first_variant();
    const char *name;
    if (!PyArg_ParseTuple(args, "iis(y*y*y*y*)(y*y*y*y*)", &width, &heads, &name, parts, parts + 1, parts + 2, parts + 3, parts + 4, parts + 5,
                          parts + 6, parts + 7))
        return NULL;
    while (variants[variant].name && strcmp(name, variants[variant].name)) variant++;
    int fits = variants[variant].name && 0 < width && width <= MOST_WIDTH && 0 < heads && width % heads == 0;
    for (int i = 0; fits && i < 2 * PROJECTIONS; i++)
        fits = (uint64_t)parts[i].len == sizeof(float) * (uint64_t)width * (uint64_t)(i < PROJECTIONS ? width : 1);
    struct layer *layer = fits ? new_layer(&variants[variant], width, heads) : NULL;
    for (int i = 0; layer && i < PROJECTIONS; i++) set_projection(layer, i, parts[i].buf, parts[PROJECTIONS + i].buf);
    for (int i = 0; i < 2 * PROJECTIONS; i++) PyBuffer_Release(&parts[i]);
    if (!layer) return fits ? PyErr_NoMemory() : (PyErr_SetString(PyExc_ValueError, "sizes or variant"), NULL);
    PyObject *capsule = PyCapsule_New(layer, CAPSULE, free_layer);
    if (!capsule) free(layer);
    return capsule;
}

static int all_finite(const float *x, Py_ssize_t n)
{
    int finite = 1;
    for (Py_ssize_t i = 0; i < n; i++) finite &= fabsf(x[i]) <= 3.4028235e38f;
    return finite;
}

/* Compute `items` items, which follow each other in the tensors of the first one. */
static void attend_items(const struct layer *layer, struct item item, Py_ssize_t items)
{
    const size_t rows[3] = {item.queries, item.keys, item.keys};
    for (; items; items--) {
        layer->variant->attend(layer, &item);
        for (int i = QUERY; i <= VALUE; i++) item.input[i] += rows[i] * layer->width;
        item.output += rows[QUERY] * layer->width;
        item.weights += (size_t)layer->heads * item.queries * item.keys;
        item.index++;
    }
}

/* Read an array of numbers of `size` bytes that has `axes` of "bhqk", each with its length in `lengths` or 1. None is no tensor. */
static int read_tensor(PyObject *array, const char *axes, Py_ssize_t size, const int lengths[AXES], Py_buffer *buffer, struct tensor *to)
{
    if (array == Py_None) return 1;
    if (PyObject_GetBuffer(array, buffer, PyBUF_STRIDED_RO)) return 0;
    int fits = buffer->itemsize == size && (size_t)buffer->ndim == strlen(axes);
    for (int i = 0; fits && i < buffer->ndim; i++) {
        const Py_ssize_t axis = strchr("bhqk", axes[i]) - "bhqk", length = buffer->shape[i];
        to->step[axis] = length == 1 ? 0 : buffer->strides[i];
        fits = length == 1 || length == lengths[axis];
    }
    to->at = buffer->buf;
    return fits ? 1 : (PyErr_SetString(PyExc_ValueError, "sizes"), 0);
}

enum { MASK_TENSORS = 8 };

/* Read the tuple of masks into `masks`, whose arrays stay in `buffers`. */
static int read_masks(PyObject *tuple, const int lengths[AXES], Py_buffer buffers[MASK_TENSORS + 1], struct masks *masks)
{
    PyObject *x[MASK_TENSORS];
    long long left, right, chunk;
    if (!PyArg_ParseTuple(tuple, "w*LLLOOOOOOOO", buffers + MASK_TENSORS, &left, &right, &chunk, x, x + 1, x + 2, x + 3, x + 4, x + 5, x + 6, x + 7))
        return 0;
    *masks = (struct masks){.left = left, .right = right, .chunk = chunk, .fully_masked = buffers[MASK_TENSORS].buf};
    if ((uint64_t)buffers[MASK_TENSORS].len != (uint64_t)lengths[ITEM_AXIS] * lengths[HEAD_AXIS] * lengths[QUERY_AXIS] || chunk < 0)
        return PyErr_SetString(PyExc_ValueError, "sizes"), 0;
    const struct { const char *axes; Py_ssize_t size; struct tensor *tensor; } table[MASK_TENSORS] = {
        {"bq", sizeof(int64_t), &masks->positions},      {"bq", sizeof(int64_t), &masks->lengths},
        {"bhqk", 1, &masks->attend_mask},                {"bk", 1, &masks->attend_keys},
        {"bq", sizeof(int64_t), &masks->query_segments}, {"bk", sizeof(int64_t), &masks->key_segments},
        {"bhqk", sizeof(float), &masks->bias},           {"bhqk", sizeof(float), &masks->head_scale},
    };
    for (int i = 0; i < MASK_TENSORS; i++)
        if (!read_tensor(x[i], table[i].axes, table[i].size, lengths, buffers + i, table[i].tensor)) return 0;
    if (!masks->query_segments.at != !masks->key_segments.at) return PyErr_SetString(PyExc_ValueError, "segments"), 0;
    return 1;
}

static PyObject *attend(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *capsule, *terms = NULL, *result = NULL;
    Py_buffer output, weights, buffers[MASK_TENSORS + 1] = {0};
    struct masks masks;
    unsigned long long inputs[3]; /* addresses: to make arrays of torch's tensors takes as long as some calls */
    int items;
    struct item item = {0};
    if (!PyArg_ParseTuple(args, "OiiifKKKw*w*|O!", &capsule, &items, &item.queries, &item.keys, &item.scale, inputs, inputs + 1, inputs + 2,
                          &output, &weights, &PyTuple_Type, &terms))
        return NULL;
    const struct layer *layer = PyCapsule_GetPointer(capsule, CAPSULE);
    int fits = layer && 0 <= items && items <= MOST_ITEMS && 0 < item.queries && item.queries <= MOST_ROWS && 0 < item.keys &&
               item.keys <= MOST_ROWS;
    const uint64_t rows = (uint64_t)items * (uint64_t)item.queries;
    fits = fits && (uint64_t)output.len == sizeof(float) * rows * (uint64_t)layer->width &&
           (uint64_t)weights.len == sizeof(float) * rows * (uint64_t)item.keys * (uint64_t)layer->heads;
    const int lengths[AXES] = {items, layer ? layer->heads : 0, item.queries, item.keys};
    const int is_read = !fits || !terms || read_masks(terms, lengths, buffers, &masks);
    if (!is_read) {
        ; /* an exception is set */
    } else if (fits && (item.scratch = malloc(scratch_size(layer, item.queries, item.keys) * sizeof(float)))) {
        for (int i = QUERY; i <= VALUE; i++) item.input[i] = (const float *)(uintptr_t)inputs[i];
        item.masks = terms ? &masks : NULL;
        item.output = output.buf;
        item.weights = weights.buf;
        attend_items(layer, item, items); /* keeps the interpreter's lock: waiting for it again could take longer */
        result = PyBool_FromLong(all_finite(output.buf, output.len / (Py_ssize_t)sizeof(float)));
        free(item.scratch);
    } else if (fits) {
        PyErr_NoMemory();
    } else if (layer) {
        PyErr_SetString(PyExc_ValueError, "sizes");
    }
    for (int i = 0; i <= MASK_TENSORS; i++)
        if (buffers[i].obj) PyBuffer_Release(&buffers[i]);
    PyBuffer_Release(&output);
    PyBuffer_Release(&weights);
    return result;
}

enum { MOST_HEADS = 1 << 20 };

/* Read (key, value, first, stop) of a page: arrays [kv_heads][any number of rows][width], of which rows first to stop are used. */
static int read_page(PyObject *tuple, const struct query *query, Py_buffer buffers[2], struct page *page)
{
    int first, stop;
    if (!PyTuple_Check(tuple)) return PyErr_SetString(PyExc_TypeError, "pages"), 0;
    if (!PyArg_ParseTuple(tuple, "y*y*ii", buffers, buffers + 1, &first, &stop)) return 0;
    const size_t row = sizeof(float) * query->kv_heads * query->width, rows = buffers[0].len / row;
    if (first < 0 || stop <= first || (size_t)stop > rows || buffers[0].len != buffers[1].len || buffers[0].len % row) {
        PyErr_SetString(PyExc_ValueError, "sizes");
        return 0;
    }
    const size_t start = (size_t)first * query->width;
    *page = (struct page){(const float *)buffers[0].buf + start, (const float *)buffers[1].buf + start, rows * query->width, stop - first};
    return 1;
}

static PyObject *attend_cache(PyObject *module, PyObject *args)
{
    (void)module;
    const char *name;
    int variant = first_variant(), threads, done = 0;
    struct query query;
    Py_buffer x[3], bias; /* query, output, log_sum_exp */
    PyObject *tuples, *result = NULL;
    if (!PyArg_ParseTuple(args, "siiiify*O!z*w*w*", &name, &threads, &query.kv_heads, &query.group, &query.width, &query.scale, x,
                          &PyTuple_Type, &tuples, &bias, x + 1, x + 2))
        return NULL;
    while (variants[variant].name && strcmp(name, variants[variant].name)) variant++;
    const Py_ssize_t count = PyTuple_Size(tuples);
    Py_ssize_t read = 0;
    uint64_t rows = 0;
    Py_buffer *buffers = PyMem_Calloc(count + 1, 2 * sizeof *buffers);
    struct page *pages = PyMem_Calloc(count + 1, sizeof *pages);
    int fits = variants[variant].name && count && 0 < query.kv_heads && query.kv_heads <= MOST_HEADS && 0 < query.group &&
               query.group <= MOST_HEADS && 0 < query.width && query.width <= WIDEST_HEAD;
    const uint64_t heads = fits ? (uint64_t)query.kv_heads * query.group : 0, sizes[3] = {heads * query.width, heads * query.width, heads};
    for (int i = 0; i < 3; i++) fits = fits && (uint64_t)x[i].len == sizeof(float) * sizes[i];
    if (!fits) PyErr_SetString(PyExc_ValueError, "sizes or variant");
    if (!buffers || !pages) PyErr_NoMemory();
    if (fits && buffers && pages) {
        query.query = x[0].buf;
        query.bias = bias.buf;
        while (read < count && read_page(PyTuple_GetItem(tuples, read), &query, buffers + 2 * read, pages + read)) rows += pages[read++].rows;
    }
    if (read && read == count && bias.buf && (uint64_t)bias.len != sizeof(float) * heads * rows) {
        PyErr_SetString(PyExc_ValueError, "sizes");
    } else if (read && read == count) {
        Py_BEGIN_ALLOW_THREADS
        done = attend_pages(variants[variant].attend_block, &query, pages, (int)count, threads, x[1].buf, x[2].buf);
        Py_END_ALLOW_THREADS
        if (!done) PyErr_NoMemory();
    }
    if (done) result = PyBool_FromLong(all_finite(x[1].buf, x[1].len / (Py_ssize_t)sizeof(float)));
    for (Py_ssize_t i = 0; buffers && i < 2 * count; i++)
        if (buffers[i].obj) PyBuffer_Release(&buffers[i]);
    for (int i = 0; i < 3; i++) PyBuffer_Release(&x[i]);
    if (bias.obj) PyBuffer_Release(&bias);
    PyMem_Free(buffers);
    PyMem_Free(pages);
    return result;
}

static PyMethodDef methods[] = {
    {"layer", make_layer, METH_VARARGS, NULL},
    {"attend", attend, METH_VARARGS, NULL},
    {"attend_cache", attend_cache, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_short", "Short calls and decoding steps in C.", -1, methods, NULL, NULL, NULL, NULL};

static PyObject *variant_names(void)
{
    PyObject *names = PyList_New(0);
    for (const struct variant *variant = variants + first_variant(); names && variant->name; variant++) {
        PyObject *name = PyUnicode_FromString(variant->name);
        if (!name || PyList_Append(names, name)) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

PyMODINIT_FUNC PyInit__short(void)
{
    PyObject *module = PyModule_Create(&definition), *names = module ? variant_names() : NULL;
    if (!names || PyModule_AddObjectRef(module, "variants", names)) Py_CLEAR(module);
    Py_XDECREF(names);
    return module;
}
