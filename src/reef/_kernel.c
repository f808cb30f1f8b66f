/* The inner loops of reads: checksums, LZ4, search in key pages, joining and picking of rows.
 *
 * Optional: reef.kernel uses it if it was built, and the Python code of reef.formats.pages
 * and reef.formats.coding otherwise. Every function returns either the same result as that code, or
 * None: "undecided". The caller then runs the Python code, which also reports damage. So nothing
 * is refused here, and no error message has a second version.
 *
 * Input is hostile until checked: every length and offset is compared with the bytes that are left
 * before it is used. Buffers are held while the GIL is released. Little-endian machines only.
 *
 *   block    u32 length | u32 crc32c | u8 kind | u8 codec | u16 0 | u32 raw length | payload | zeros
 *   key page u32 0 | u32 0 | u32 rows | u32 4 | 4 columns of { u16 number | u16 buffers | lengths }
 *   column   u32 rows | u32 1 | u16 number | u16 buffers | lengths of validity, [offsets,] data
 */

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifndef _WIN32
#include <sys/stat.h>
#include <unistd.h>
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAS_SSE42 1
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define HAS_ARM_CRC 1
#endif

#define KERNEL_VERSION 1
#define ABSENT 0xFFFFFFFFu
#define OFFSET_MAX 0x7FFFFFFF
#define BLOCK_HEAD 16
#define CHECKED_FROM 8
#define KEY_HEAD 72
#define COLUMN_HEAD 24
#define KIND_MAX 3
#define KIND_DELETE 1
#define FIRST_PARTIAL 3
#define RATIO_MAX 1024
#define RATIO_SLACK (64 * 1024)
#define CODEC_NONE 0
#define CODEC_LZ4 1
#define CODEC_ZSTD 2
#define FILTER_BLOCK 32
#define COLUMNS_MAX 1024
#define PAGE_BYTES_MAX (16 << 20) /* of a page that is read here, all its blocks together */
#define SPARE_BYTES (1 << 20) /* of memory that is kept from call to call */
#define SPARES 3
#define RELEASE_BYTES (256 * 1024) /* shorter work would wait longer for the GIL than it takes */

static inline uint16_t u16_at(const uint8_t *p) { uint16_t v; memcpy(&v, p, 2); return v; }
static inline uint32_t u32_at(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return v; }
static inline uint64_t u64_at(const uint8_t *p) { uint64_t v; memcpy(&v, p, 8); return v; }
static inline int32_t i32_at(const uint8_t *p) { int32_t v; memcpy(&v, p, 4); return v; }
static inline uint64_t padded(uint64_t length) { return (length + 7) & ~(uint64_t)7; }

static PyObject *undecided(void) { Py_RETURN_NONE; }

/* --- crc32c ------------------------------------------------------------------------------- */

#define POLYNOMIAL 0x82F63B78u
#define LANE 512 /* three lanes of this many bytes are computed at a time */

static uint32_t crc_table[8][256];
static uint32_t lane_shift[4][256]; /* the effect of LANE zero bytes on each byte of a crc */

static uint32_t crc_plain(uint32_t crc, const uint8_t *p, size_t size)
{
    for (; size >= 8; size -= 8, p += 8) {
        uint64_t word = u64_at(p) ^ crc;
        crc = crc_table[7][word & 255] ^ crc_table[6][word >> 8 & 255] ^
              crc_table[5][word >> 16 & 255] ^ crc_table[4][word >> 24 & 255] ^
              crc_table[3][word >> 32 & 255] ^ crc_table[2][word >> 40 & 255] ^
              crc_table[1][word >> 48 & 255] ^ crc_table[0][word >> 56];
    }
    while (size--)
        crc = crc_table[0][(crc ^ *p++) & 255] ^ crc >> 8;
    return crc;
}

static void init_crc(void)
{
    for (uint32_t n = 0; n < 256; n++) {
        uint32_t crc = n;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? crc >> 1 ^ POLYNOMIAL : crc >> 1;
        crc_table[0][n] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (uint32_t n = 0; n < 256; n++)
            crc_table[k][n] = crc_table[0][crc_table[k - 1][n] & 255] ^ crc_table[k - 1][n] >> 8;
    static const uint8_t zeros[LANE];
    for (int k = 0; k < 4; k++)
        for (uint32_t n = 0; n < 256; n++)
            lane_shift[k][n] = crc_plain(n << 8 * k, zeros, LANE);
}

#ifdef HAS_SSE42
static inline uint32_t shifted(uint32_t crc)
{
    return lane_shift[0][crc & 255] ^ lane_shift[1][crc >> 8 & 255] ^
           lane_shift[2][crc >> 16 & 255] ^ lane_shift[3][crc >> 24];
}

__attribute__((target("sse4.2"))) static uint32_t crc_sse42(
    uint32_t crc, const uint8_t *p, size_t size)
{
    uint64_t a = crc;
    while (size >= 3 * LANE) {
        uint64_t b = 0, c = 0;
        for (const uint8_t *end = p + LANE; p < end; p += 8) {
            a = _mm_crc32_u64(a, u64_at(p));
            b = _mm_crc32_u64(b, u64_at(p + LANE));
            c = _mm_crc32_u64(c, u64_at(p + 2 * LANE));
        }
        a = shifted(shifted((uint32_t)a) ^ (uint32_t)b) ^ (uint32_t)c;
        p += 2 * LANE;
        size -= 3 * LANE;
    }
    for (; size >= 8; size -= 8, p += 8)
        a = _mm_crc32_u64(a, u64_at(p));
    uint32_t rest = (uint32_t)a;
    while (size--)
        rest = _mm_crc32_u8(rest, *p++);
    return rest;
}
#endif

static uint32_t crc32c(const uint8_t *p, size_t size)
{
#ifdef HAS_SSE42
    if (__builtin_cpu_supports("sse4.2"))
        return ~crc_sse42(~0u, p, size);
#elif defined(HAS_ARM_CRC)
    uint32_t crc = ~0u;
    for (; size >= 8; size -= 8, p += 8)
        crc = __crc32cd(crc, u64_at(p));
    while (size--)
        crc = __crc32cb(crc, *p++);
    return ~crc;
#endif
    return ~crc_plain(~0u, p, size);
}

/* --- LZ4 ---------------------------------------------------------------------------------- */

/* Copy a match, whose source may overlap its target: what is there already doubles each time. */
static void copy_match(uint8_t *target, size_t offset, size_t length)
{
    const uint8_t *source = target - offset;
    while (length) {
        size_t some = (size_t)(target - source) < length ? (size_t)(target - source) : length;
        memcpy(target, source, some);
        target += some;
        length -= some;
    }
}

static int more_length(const uint8_t **in, const uint8_t *end, size_t *length, size_t most)
{
    uint8_t byte;
    do {
        if (*in >= end || *length > most)
            return 0;
        byte = *(*in)++;
        *length += byte;
    } while (byte == 255);
    return 1;
}

/* Decompress to exactly `size` bytes; 0 if the input is damaged, or the library refuses it. */
static int lz4_decode(const uint8_t *in, size_t in_size, uint8_t *out, size_t size)
{
    const uint8_t *in_end = in + in_size, *start = out, *end = out + size;
    while (in < in_end) {
        unsigned token = *in++;
        size_t length = token >> 4;
        if (length == 15 && !more_length(&in, in_end, &length, size))
            return 0;
        if (length > (size_t)(in_end - in) || length > (size_t)(end - out))
            return 0;
        if (length <= 64 && in_end - in >= 64 && end - out >= 64) {
            memcpy(out, in, 32);
            if (length > 32)
                memcpy(out + 32, in + 32, 32);
        } else {
            memcpy(out, in, length);
        }
        in += length;
        out += length;
        if (in == in_end)
            return out == end;
        /* The library takes literals this close to either end for the last ones. */
        if (in_end - in < 8 || end - out < 12)
            return 0;
        size_t offset = u16_at(in);
        in += 2;
        length = token & 15;
        if (length == 15 && !more_length(&in, in_end, &length, size))
            return 0;
        length += 4;
        if (!offset || offset > (size_t)(out - start) || length + 5 > (size_t)(end - out))
            return 0;
        if (offset >= 16 && length <= 64 && end - out >= 64) {
            for (size_t at = 0; at < length; at += 16)
                memcpy(out + at, out + at - offset, 16);
        } else {
            copy_match(out, offset, length);
        }
        out += length;
    }
    return 0;
}

/* --- blocks ------------------------------------------------------------------------------- */

typedef struct {
    const uint8_t *stored;
    uint32_t length, raw_length;
    int codec;
} Block;

/* Check a block; 0 if it is damaged, or of a codec that is not decompressed here. */
static int open_block(const uint8_t *data, size_t size, int kind, Block *block)
{
    if (size < BLOCK_HEAD)
        return 0;
    block->length = u32_at(data);
    block->raw_length = u32_at(data + 12);
    block->codec = data[9];
    block->stored = data + BLOCK_HEAD;
    if (padded(block->length) != size - BLOCK_HEAD || data[8] != kind || u16_at(data + 10))
        return 0;
    if (block->raw_length > (uint64_t)block->length * RATIO_MAX + RATIO_SLACK)
        return 0;
    if (block->codec == CODEC_NONE)
        block->raw_length = block->length;
    else if (block->codec != CODEC_LZ4 || !block->raw_length)
        return 0;
    return crc32c(data + CHECKED_FROM, size - CHECKED_FROM) == u32_at(data + 4);
}

static PyObject *block_payload(const uint8_t *data, size_t size, int kind)
{
    Block block;
    if (!open_block(data, size, kind, &block))
        return undecided();
    if (block.codec == CODEC_NONE)
        return PyBytes_FromStringAndSize((const char *)block.stored, block.length);
    PyObject *raw = PyBytes_FromStringAndSize(NULL, block.raw_length);
    if (raw == NULL)
        return NULL;
    uint8_t *out = (uint8_t *)PyBytes_AsString(raw);
    if (lz4_decode(block.stored, block.length, out, block.raw_length))
        return raw;
    Py_DECREF(raw);
    return undecided();
}

/* Bytes of Python objects, held until they are released. */
typedef struct {
    Py_buffer *views;
    Py_ssize_t count;
} Held;

static void release(Held *held)
{
    for (Py_ssize_t n = 0; n < held->count; n++)
        PyBuffer_Release(&held->views[n]);
    PyMem_Free(held->views);
    held->views = NULL;
    held->count = 0;
}

static int hold(PyObject *list, Held *held)
{
    held->views = NULL;
    held->count = 0;
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "a list of buffers is expected");
        return 0;
    }
    Py_ssize_t count = PyList_Size(list);
    held->views = PyMem_Calloc(count ? count : 1, sizeof(Py_buffer));
    if (held->views == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    for (Py_ssize_t n = 0; n < count; n++, held->count++) {
        PyObject *item = PyList_GetItem(list, n); /* fails if the list became shorter */
        if (item == NULL || PyObject_GetBuffer(item, &held->views[n], PyBUF_SIMPLE) < 0) {
            release(held);
            return 0;
        }
    }
    return 1;
}

/* An array of numbers that Python gives as a buffer. */
static int numbers_of(PyObject *object, Py_buffer *view, size_t width, Py_ssize_t count)
{
    if (PyObject_GetBuffer(object, view, PyBUF_SIMPLE) < 0)
        return 0;
    if (view->len == (Py_ssize_t)width * count)
        return 1;
    PyBuffer_Release(view);
    PyErr_SetString(PyExc_ValueError, "an array has another length than expected");
    return 0;
}

PyDoc_STRVAR(decode_block_doc,
    "decode_block(data, kind)\n--\n\n"
    "Return the payload of a block as bytes; None if undecided.");

static PyObject *decode_block(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer data;
    int kind;
    if (!PyArg_ParseTuple(args, "y*i:decode_block", &data, &kind))
        return NULL;
    PyObject *payload = block_payload(data.buf, data.len, kind);
    PyBuffer_Release(&data);
    return payload;
}

/* Stored blocks within bodies that were read together: [start, end) of each, by object offset. */
typedef struct {
    Held bodies;
    Py_buffer bases, starts, ends;
    Py_ssize_t count;
} Stored;

static void release_stored(Stored *stored)
{
    if (stored->ends.obj)
        PyBuffer_Release(&stored->ends);
    if (stored->starts.obj)
        PyBuffer_Release(&stored->starts);
    if (stored->bases.obj)
        PyBuffer_Release(&stored->bases);
    release(&stored->bodies);
}

static int hold_stored(
    PyObject *bodies, PyObject *bases, PyObject *starts, PyObject *ends, Stored *stored)
{
    memset(stored, 0, sizeof *stored);
    if (!hold(bodies, &stored->bodies))
        return 0;
    if (numbers_of(bases, &stored->bases, 8, stored->bodies.count) &&
        PyObject_GetBuffer(starts, &stored->starts, PyBUF_SIMPLE) == 0) {
        stored->count = stored->starts.len / 8;
        if (numbers_of(ends, &stored->ends, 8, stored->count))
            return 1;
    }
    release_stored(stored);
    return 0;
}

/* Find the bytes of a block; 0 if no body has them. */
static int stored_block(const Stored *stored, Py_ssize_t n, const uint8_t **data, size_t *size)
{
    const int64_t *bases = stored->bases.buf;
    int64_t start = ((const int64_t *)stored->starts.buf)[n];
    int64_t end = ((const int64_t *)stored->ends.buf)[n];
    Py_ssize_t low = 0, high = stored->bodies.count;
    while (low < high) {
        Py_ssize_t middle = low + (high - low) / 2;
        if (bases[middle] <= start)
            low = middle + 1;
        else
            high = middle;
    }
    if (!low || start < 0 || start > end)
        return 0;
    const Py_buffer *body = &stored->bodies.views[low - 1];
    uint64_t skipped = (uint64_t)start - (uint64_t)bases[low - 1];
    if (bases[low - 1] < 0 || skipped > (uint64_t)body->len)
        return 0;
    if ((uint64_t)(end - start) > (uint64_t)body->len - skipped)
        return 0;
    *data = (const uint8_t *)body->buf + skipped;
    *size = (size_t)(end - start);
    return 1;
}

PyDoc_STRVAR(decode_blocks_doc,
    "decode_blocks(bodies, bases, starts, ends, kinds)\n--\n\n"
    "Return the payloads of blocks as a list of bytes, None for each that is undecided.\n\n"
    "`bodies` are ranges of one object that begin at `bases`, in order; `starts` and `ends` are\n"
    "where the blocks are (arrays of int64), `kinds` has a byte for each.");

static PyObject *decode_blocks(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *bodies, *bases, *starts, *ends, *kinds_object;
    if (!PyArg_ParseTuple(
            args, "OOOOO:decode_blocks", &bodies, &bases, &starts, &ends, &kinds_object))
        return NULL;
    Stored stored;
    Py_buffer kinds;
    if (!hold_stored(bodies, bases, starts, ends, &stored))
        return NULL;
    if (!numbers_of(kinds_object, &kinds, 1, stored.count)) {
        release_stored(&stored);
        return NULL;
    }
    PyObject *payloads = PyList_New(stored.count);
    for (Py_ssize_t n = 0; payloads != NULL && n < stored.count; n++) {
        const uint8_t *data;
        size_t size;
        PyObject *payload = stored_block(&stored, n, &data, &size)
                                ? block_payload(data, size, ((const uint8_t *)kinds.buf)[n])
                                : undecided();
        if (payload == NULL) {
            Py_DECREF(payloads);
            payloads = NULL;
        } else {
            PyList_SetItem(payloads, n, payload);
        }
    }
    PyBuffer_Release(&kinds);
    release_stored(&stored);
    return payloads;
}

/* --- key pages ---------------------------------------------------------------------------- */

typedef struct {
    uint32_t rows;
    uint32_t width; /* of each key; 0 if there are offsets */
    uint32_t data_size;
    const uint8_t *offsets, *data, *lsns, *seqs, *kinds;
} KeyPage;

/* Read the head of a plain key page; 0 if it has another shape. Offsets are not checked yet. */
static int open_key_page(const uint8_t *p, size_t size, int64_t rows, KeyPage *page)
{
    static const uint8_t LSN[8] = {2, 0, 2, 0, 255, 255, 255, 255};
    static const uint8_t SEQ[8] = {3, 0, 2, 0, 255, 255, 255, 255};
    static const uint8_t KIND[8] = {4, 0, 2, 0, 255, 255, 255, 255};
    if (size < KEY_HEAD || rows <= 0 || u64_at(p) || u32_at(p + 8) != rows || u32_at(p + 12) != 4)
        return 0;
    if (u16_at(p + 16) != 1 || u16_at(p + 18) != 3 || u32_at(p + 20) != ABSENT)
        return 0;
    if (memcmp(p + 32, LSN, 8) || memcmp(p + 44, SEQ, 8) || memcmp(p + 56, KIND, 8))
        return 0;
    uint64_t count = (uint64_t)rows, offsets = u32_at(p + 24), data = u32_at(p + 28);
    if (u32_at(p + 40) != 8 * count || u32_at(p + 52) != 4 * count || u32_at(p + 64) != count)
        return 0;
    uint64_t data_at = KEY_HEAD;
    if (offsets == ABSENT) {
        if (!data || data % count)
            return 0;
        page->width = (uint32_t)(data / count);
    } else {
        if (offsets != 4 * (count + 1))
            return 0;
        page->width = 0;
        data_at += padded(offsets);
    }
    uint64_t lsns_at = data_at + padded(data), seqs_at = lsns_at + 8 * count;
    uint64_t kinds_at = seqs_at + padded(4 * count);
    if (kinds_at + padded(count) != size)
        return 0;
    page->rows = (uint32_t)count;
    page->data_size = (uint32_t)data;
    page->offsets = p + KEY_HEAD;
    page->data = p + data_at;
    page->lsns = p + lsns_at;
    page->seqs = p + seqs_at;
    page->kinds = p + kinds_at;
    return 1;
}

/* Whether offsets rise from 0 to the size of the data. */
static int offsets_rise(const uint8_t *offsets, uint32_t rows, uint32_t size)
{
    int32_t before = i32_at(offsets);
    int falls = before != 0;
    for (uint32_t n = 1; n <= rows; n++) {
        int32_t next = i32_at(offsets + 4 * (size_t)n);
        falls |= next < before;
        before = next;
    }
    return !falls && before >= 0 && (uint32_t)before == size;
}

static int rows_are_valid(const KeyPage *page)
{
    uint8_t highest = 0;
    for (uint32_t n = 0; n < page->rows; n++)
        highest = page->kinds[n] > highest ? page->kinds[n] : highest;
    return highest <= KIND_MAX &&
           (page->width || offsets_rise(page->offsets, page->rows, page->data_size));
}

/* The bytes of a key; 0 if its offsets are outside of the page. */
static inline int key_at(const KeyPage *page, uint32_t row, const uint8_t **key, uint32_t *size)
{
    if (page->width) {
        *key = page->data + (size_t)row * page->width;
        *size = page->width;
        return 1;
    }
    int32_t first = i32_at(page->offsets + 4 * (size_t)row);
    int32_t last = i32_at(page->offsets + 4 * (size_t)row + 4);
    if (first < 0 || first > last || (uint32_t)last > page->data_size)
        return 0;
    *key = page->data + first;
    *size = (uint32_t)(last - first);
    return 1;
}

/* The first row whose key is not below the given one; or, with `above`, is above it. -1: damage. */
static int64_t key_bound(
    const KeyPage *page, const uint8_t *key, size_t size, uint32_t low, int above)
{
    uint32_t high = page->rows;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2, length;
        const uint8_t *other;
        if (!key_at(page, middle, &other, &length))
            return -1;
        int order = memcmp(other, key, length < size ? length : size);
        if (!order)
            order = (length > size) - (length < size);
        if (order < 0 || (above && !order))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The rows [first, last) of a key; 0 if the page is damaged. */
static int find_in_page(
    const KeyPage *page, const uint8_t *key, size_t size, int64_t *first, int64_t *last)
{
    const uint8_t *other;
    uint32_t length;
    *first = *last = key_bound(page, key, size, 0, 0);
    if (*first < 0)
        return 0;
    for (int n = 0; n < 2; n++, ++*last) { /* most keys have one version */
        if (*last == page->rows)
            return 1;
        if (!key_at(page, (uint32_t)*last, &other, &length))
            return 0;
        if (length != size || memcmp(other, key, size))
            return 1;
    }
    *last = key_bound(page, key, size, (uint32_t)*last, 1);
    return *last >= 0;
}

PyDoc_STRVAR(find_key_doc,
    "find_key(payload, key, rows)\n--\n\n"
    "Return (first, last, lsn, seq, kind) of a key in a key page: its versions are the rows\n"
    "[first, last), the stamp is that of the first. None if undecided.");

static PyObject *find_key(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer payload, key;
    long long rows;
    if (!PyArg_ParseTuple(args, "y*y*L:find_key", &payload, &key, &rows))
        return NULL;
    KeyPage page;
    int64_t first, last, lsn = 0;
    uint32_t seq = 0;
    int kind = 0;
    int decided = open_key_page(payload.buf, payload.len, rows, &page) &&
                  find_in_page(&page, key.buf, key.len, &first, &last);
    if (decided && first < last) {
        memcpy(&lsn, page.lsns + 8 * first, 8);
        seq = u32_at(page.seqs + 4 * first);
        kind = page.kinds[first];
    }
    PyBuffer_Release(&key);
    PyBuffer_Release(&payload);
    if (!decided)
        return undecided();
    return Py_BuildValue("(LLLIi)", (long long)first, (long long)last, (long long)lsn, seq, kind);
}

/* --- column pages ------------------------------------------------------------------------- */

typedef struct {
    uint32_t rows;
    uint32_t width; /* of each value; 0 if there are offsets */
    uint32_t data_size;
    const uint8_t *validity, *offsets, *data; /* NULL if absent */
} ColumnPage;

/* Read the head of a column page. `width` is that of the type: 0 for texts and bytes, negative for
 * vectors, whose values have a bitmap of their own, which must be absent. */
static int open_column_page(
    const uint8_t *p, size_t size, int64_t rows, int number, int64_t width, ColumnPage *page)
{
    int buffers = width > 0 ? 2 : 3;
    if (size < COLUMN_HEAD || rows <= 0 || u32_at(p) != rows || u32_at(p + 4) != 1)
        return 0;
    if (u16_at(p + 8) != number || u16_at(p + 10) != buffers)
        return 0;
    uint64_t count = (uint64_t)rows, validity = u32_at(p + 12), at = COLUMN_HEAD;
    uint64_t offsets = buffers == 3 ? u32_at(p + 16) : ABSENT;
    uint64_t data = u32_at(p + (buffers == 3 ? 20 : 16));
    page->rows = (uint32_t)count;
    page->data_size = (uint32_t)data;
    page->validity = page->offsets = NULL;
    if (validity != ABSENT) {
        if (validity != (count + 7) / 8)
            return 0;
        page->validity = p + at;
        at += padded(validity);
    }
    if (width) {
        page->width = (uint32_t)(width < 0 ? -width : width);
        if (offsets != ABSENT || data != page->width * count)
            return 0;
    } else if (offsets == ABSENT) {
        if (!data || data % count)
            return 0;
        page->width = (uint32_t)(data / count);
    } else {
        if (offsets != 4 * (count + 1))
            return 0;
        page->width = 0;
        if (at + padded(offsets) > size)
            return 0;
        page->offsets = p + at;
        at += padded(offsets);
    }
    if (at + padded(data) != size)
        return 0;
    page->data = p + at;
    return 1;
}

static inline int is_valid(const ColumnPage *page, uint32_t row)
{
    return page->validity == NULL || page->validity[row >> 3] >> (row & 7) & 1;
}

static PyObject *value_at(const uint8_t *p, size_t size, int64_t row, int64_t rows)
{
    ColumnPage page;
    if (row < 0 || row >= rows || size < COLUMN_HEAD ||
        !open_column_page(p, size, rows, u16_at(p + 8), 0, &page))
        return undecided();
    if (!is_valid(&page, (uint32_t)row))
        return Py_BuildValue("(O)", Py_None);
    int64_t first = row * (int64_t)page.width, last = first + page.width;
    if (page.offsets) {
        first = i32_at(page.offsets + 4 * row);
        last = i32_at(page.offsets + 4 * row + 4);
        if (first < 0 || first > last || last > page.data_size)
            return undecided();
    }
    return Py_BuildValue("(y#)", page.data + first, (Py_ssize_t)(last - first));
}

PyDoc_STRVAR(bytes_at_doc,
    "bytes_at(payload, row, rows)\n--\n\n"
    "Return (value,) of a row in a page of texts or bytes, (None,) if it is null; None if\n"
    "undecided.");

static PyObject *bytes_at(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer payload;
    long long row, rows;
    if (!PyArg_ParseTuple(args, "y*LL:bytes_at", &payload, &row, &rows))
        return NULL;
    PyObject *found = value_at(payload.buf, payload.len, row, rows);
    PyBuffer_Release(&payload);
    return found;
}

/* --- many pages --------------------------------------------------------------------------- */

/* The payloads of pages: given as they are, or decompressed from stored blocks one by one. */
typedef struct {
    Held payloads;
    Stored stored;
    int is_stored, kind;
    Py_ssize_t count;
    uint8_t *scratch;
    size_t room;
    uint64_t bytes; /* an upper bound of all payloads together */
} Pages;

static void release_pages(Pages *pages)
{
    if (pages->is_stored)
        release_stored(&pages->stored);
    else
        release(&pages->payloads);
    free(pages->scratch);
}

static int hold_pages(PyObject *source, int kind, Pages *pages)
{
    memset(pages, 0, sizeof *pages);
    pages->kind = kind;
    if (!PyTuple_Check(source)) {
        if (!hold(source, &pages->payloads))
            return 0;
        pages->count = pages->payloads.count;
        for (Py_ssize_t n = 0; n < pages->count; n++)
            pages->bytes += (uint64_t)pages->payloads.views[n].len;
        return 1;
    }
    PyObject *bodies, *bases, *starts, *ends;
    if (!PyArg_ParseTuple(source, "OOOO", &bodies, &bases, &starts, &ends) ||
        !hold_stored(bodies, bases, starts, ends, &pages->stored))
        return 0;
    pages->is_stored = 1;
    pages->count = pages->stored.count;
    for (Py_ssize_t n = 0; n < pages->count; n++) {
        const uint8_t *data;
        size_t size;
        /* What a damaged head claims is no reason to allocate: it is refused later. */
        if (!stored_block(&pages->stored, n, &data, &size) || size < BLOCK_HEAD)
            continue;
        uint64_t raw = data[9] == CODEC_NONE ? u32_at(data) : u32_at(data + 12);
        pages->bytes += raw <= size * (uint64_t)RATIO_MAX + RATIO_SLACK ? raw : 0;
    }
    return 1;
}

/* The payload of the next page, valid until the one after it; 0 if undecided. No GIL needed. */
static int payload_of(Pages *pages, Py_ssize_t n, const uint8_t **payload, size_t *size)
{
    if (!pages->is_stored) {
        *payload = pages->payloads.views[n].buf;
        *size = (size_t)pages->payloads.views[n].len;
        return 1;
    }
    const uint8_t *data;
    Block block;
    if (!stored_block(&pages->stored, n, &data, size) ||
        !open_block(data, *size, pages->kind, &block))
        return 0;
    *size = block.raw_length;
    *payload = block.stored;
    if (block.codec == CODEC_NONE)
        return 1;
    if (pages->room < *size) {
        free(pages->scratch);
        pages->room = *size + *size / 2;
        pages->scratch = malloc(pages->room);
        if (pages->scratch == NULL) {
            pages->room = 0;
            return 0;
        }
    }
    *payload = pages->scratch;
    return lz4_decode(block.stored, block.length, pages->scratch, *size);
}

/* The sum of the rows of all pages; -1 if one is negative or the sum too large for offsets. */
static int64_t count_rows(const Py_buffer *rows, Py_ssize_t count)
{
    int64_t total = 0;
    for (Py_ssize_t n = 0; n < count; n++) {
        int64_t some = ((const int64_t *)rows->buf)[n];
        if (some <= 0 || some > OFFSET_MAX || (total += some) >= OFFSET_MAX)
            return -1;
    }
    return total;
}

/* An upper bound of the data in pages, besides their heads and some bytes of each row. */
static uint64_t room_for(const Pages *pages, uint64_t head, uint64_t row, int64_t rows)
{
    uint64_t other = head * (uint64_t)pages->count + row * (uint64_t)rows;
    return pages->bytes > other ? pages->bytes - other : 0;
}

/* The rows of a page that are picked: pairs of page and row, in the order of the pages. */
typedef struct {
    const int32_t *pairs; /* NULL: every row */
    Py_ssize_t count, at;
} Picks;

/* Values that are put together; without offsets if all have the width of their type. */
typedef struct {
    int32_t *offsets;
    uint8_t *data;
    uint64_t room, used;
    int64_t rows;
    int is_growing;
} Variable;

/* The data as bytes; those that grew are copied. */
static int end_data(Variable *out, PyObject **target)
{
    if (out->is_growing)
        *target = PyBytes_FromStringAndSize((const char *)out->data, (Py_ssize_t)out->used);
    return *target != NULL;
}

/* Picked values go to memory that grows: of all pages together they are a small part. */
static int grow(Variable *out, uint64_t size)
{
    uint64_t room = 2 * (out->used + size) + 1024;
    uint8_t *data = out->is_growing ? realloc(out->data, room) : NULL;
    if (data == NULL)
        return 0;
    out->data = data;
    out->room = room;
    return 1;
}

static int append_range(Variable *out, const uint8_t *data, uint64_t size)
{
    if (out->used + size > OFFSET_MAX || (size > out->room - out->used && !grow(out, size)))
        return 0;
    if (size)
        memcpy(out->data + out->used, data, size);
    out->used += size;
    return 1;
}

static int append_all(
    Variable *out, const uint8_t *offsets, uint32_t width, const uint8_t *data, uint32_t size,
    uint32_t rows)
{
    int32_t base = (int32_t)out->used;
    if (!append_range(out, data, size))
        return 0;
    int32_t *target = out->offsets + out->rows;
    if (offsets)
        for (uint32_t n = 0; n < rows; n++)
            target[n] = base + i32_at(offsets + 4 * (size_t)n);
    else
        for (uint32_t n = 0; n < rows; n++)
            target[n] = base + (int32_t)(n * width);
    out->rows += rows;
    return 1;
}

static int append_one(
    Variable *out, const uint8_t *offsets, uint32_t width, const uint8_t *data, uint32_t row)
{
    int64_t first = (int64_t)row * width, last = first + width;
    if (offsets) {
        first = i32_at(offsets + 4 * (size_t)row);
        last = i32_at(offsets + 4 * (size_t)row + 4);
    }
    out->offsets[out->rows++] = (int32_t)out->used;
    return append_range(out, data + first, (uint64_t)(last - first));
}

static void end_variable(Variable *out)
{
    out->offsets[out->rows] = (int32_t)out->used;
    if (!out->is_growing)
        memset(out->data + out->used, 0, out->room - out->used);
}

typedef struct {
    Variable keys;
    uint8_t *lsns, *seqs, *kinds;
} KeyRows;

static int append_keys(KeyRows *out, const KeyPage *page, Py_ssize_t number, Picks *picks)
{
    const uint8_t *offsets = page->width ? NULL : page->offsets;
    int64_t at = out->keys.rows;
    if (picks->pairs == NULL) {
        memcpy(out->lsns + 8 * at, page->lsns, 8 * (size_t)page->rows);
        memcpy(out->seqs + 4 * at, page->seqs, 4 * (size_t)page->rows);
        memcpy(out->kinds + at, page->kinds, page->rows);
        return append_all(
            &out->keys, offsets, page->width, page->data, page->data_size, page->rows);
    }
    for (; picks->at < picks->count && picks->pairs[2 * picks->at] == number; picks->at++, at++) {
        uint32_t row = (uint32_t)picks->pairs[2 * picks->at + 1];
        if (row >= page->rows || !append_one(&out->keys, offsets, page->width, page->data, row))
            return 0;
        memcpy(out->lsns + 8 * at, page->lsns + 8 * (size_t)row, 8);
        memcpy(out->seqs + 4 * at, page->seqs + 4 * (size_t)row, 4);
        out->kinds[at] = page->kinds[row];
    }
    return 1;
}

static int join_key_pages(Pages *pages, const int64_t *rows, Picks *picks, KeyRows *out)
{
    for (Py_ssize_t n = 0; n < pages->count; n++) {
        const uint8_t *payload;
        size_t size;
        KeyPage page;
        if (!payload_of(pages, n, &payload, &size) ||
            !open_key_page(payload, size, rows[n], &page) || !rows_are_valid(&page) ||
            !append_keys(out, &page, n, picks))
            return 0;
    }
    end_variable(&out->keys);
    return picks->at == picks->count;
}

static int open_picks(PyObject *object, Py_buffer *view, Picks *picks)
{
    memset(picks, 0, sizeof *picks);
    memset(view, 0, sizeof *view);
    if (object == Py_None)
        return 1;
    if (PyObject_GetBuffer(object, view, PyBUF_SIMPLE) < 0)
        return 0;
    picks->pairs = view->buf;
    picks->count = view->len / 8;
    return 1;
}

static void *new_bytes(PyObject **target, uint64_t size)
{
    *target = size > PY_SSIZE_T_MAX ? PyErr_NoMemory()
                                    : PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
    return *target == NULL ? NULL : PyBytes_AsString(*target);
}

PyDoc_STRVAR(join_keys_doc,
    "join_keys(pages, kind, rows, picks)\n--\n\n"
    "Return (offsets, data, lsns, seqs, kinds) of plain key pages, as bytes; None if undecided.\n\n"
    "`pages` is a list of payloads, or a tuple of the arguments of `decode_blocks` up to `ends`;\n"
    "`rows` those of each page (int64). With `picks`, only these rows: pairs of page and row\n"
    "(int32), in the order of pages. The data may be followed by some zeros.");

static PyObject *join_keys(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *source, *rows_object, *picks_object;
    int kind;
    if (!PyArg_ParseTuple(args, "OiOO:join_keys", &source, &kind, &rows_object, &picks_object))
        return NULL;
    Pages pages;
    Py_buffer rows = {0}, picks_view = {0};
    Picks picks;
    PyObject *parts[5] = {NULL}, *result = NULL;
    KeyRows out = {0};
    if (!hold_pages(source, kind, &pages))
        return NULL;
    if (!numbers_of(rows_object, &rows, 8, pages.count) ||
        !open_picks(picks_object, &picks_view, &picks))
        goto end;
    int64_t total = count_rows(&rows, pages.count);
    int decided = total >= 0 && picks.count <= total;
    if (decided) {
        uint64_t count = (uint64_t)(picks.pairs ? picks.count : total);
        if (picks.pairs)
            out.keys.is_growing = 1;
        else
            out.keys.room = room_for(&pages, KEY_HEAD, 13, total);
        if (!(out.keys.offsets = new_bytes(&parts[0], 4 * (count + 1))) ||
            (!picks.pairs && !(out.keys.data = new_bytes(&parts[1], out.keys.room))) ||
            !(out.lsns = new_bytes(&parts[2], 8 * count)) ||
            !(out.seqs = new_bytes(&parts[3], 4 * count)) ||
            !(out.kinds = new_bytes(&parts[4], count)))
            goto end;
        if (pages.bytes > RELEASE_BYTES) {
            Py_BEGIN_ALLOW_THREADS
            decided = join_key_pages(&pages, rows.buf, &picks, &out);
            Py_END_ALLOW_THREADS
        } else {
            decided = join_key_pages(&pages, rows.buf, &picks, &out);
        }
        if (decided && !end_data(&out.keys, &parts[1]))
            goto end;
    }
    result = decided ? Py_BuildValue("(OOOOO)", parts[0], parts[1], parts[2], parts[3], parts[4])
                     : undecided();
end:
    if (out.keys.is_growing)
        free(out.keys.data);
    for (int n = 0; n < 5; n++)
        Py_XDECREF(parts[n]);
    if (picks_view.obj)
        PyBuffer_Release(&picks_view);
    if (rows.obj)
        PyBuffer_Release(&rows);
    release_pages(&pages);
    return result;
}

typedef struct {
    Variable values; /* of texts and bytes; otherwise only `data` and `rows` */
    uint8_t *validity;
    int has_nulls;
} ColumnRows;

static inline void append_validity(
    ColumnRows *out, int64_t at, const ColumnPage *page, uint32_t row)
{
    if (is_valid(page, row))
        return;
    out->validity[at >> 3] &= (uint8_t)~(1 << (at & 7));
    out->has_nulls = 1;
}

static int append_column(
    ColumnRows *out, const ColumnPage *page, Py_ssize_t number, int64_t width, Picks *picks)
{
    Variable *values = &out->values;
    int64_t at = values->rows;
    if (picks->pairs == NULL) {
        for (uint32_t row = 0; page->validity != NULL && row < page->rows; row++)
            append_validity(out, at + row, page, row);
        if (width) {
            values->rows += page->rows;
            return append_range(values, page->data, page->data_size);
        }
        return append_all(
            values, page->offsets, page->width, page->data, page->data_size, page->rows);
    }
    for (; picks->at < picks->count && picks->pairs[2 * picks->at] == number; picks->at++, at++) {
        uint32_t row = (uint32_t)picks->pairs[2 * picks->at + 1];
        if (row >= page->rows)
            return 0;
        append_validity(out, at, page, row);
        if (width) {
            values->rows++;
            if (!append_range(values, page->data + (size_t)row * page->width, page->width))
                return 0;
        } else if (!append_one(values, page->offsets, page->width, page->data, row)) {
            return 0;
        }
    }
    return 1;
}

static int join_column_pages(
    Pages *pages, const int64_t *rows, int number, int64_t width, Picks *picks, ColumnRows *out)
{
    for (Py_ssize_t n = 0; n < pages->count; n++) {
        const uint8_t *payload;
        size_t size;
        ColumnPage page;
        if (!payload_of(pages, n, &payload, &size) ||
            !open_column_page(payload, size, rows[n], number, width, &page) ||
            (page.offsets && !offsets_rise(page.offsets, page.rows, page.data_size)) ||
            !append_column(out, &page, n, width, picks))
            return 0;
    }
    if (!width)
        end_variable(&out->values);
    return picks->at == picks->count;
}

PyDoc_STRVAR(join_column_doc,
    "join_column(pages, kind, rows, number, width, picks)\n--\n\n"
    "Return (validity, offsets, data) of column pages, as bytes or None; None if undecided.\n\n"
    "`width` is that of a value in bytes: 0 for texts and bytes, negative for vectors. The other\n"
    "arguments are those of `join_keys`.");

static PyObject *join_column(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *source, *rows_object, *picks_object;
    int kind, number;
    long long width;
    if (!PyArg_ParseTuple(args, "OiOiLO:join_column", &source, &kind, &rows_object, &number, &width,
            &picks_object))
        return NULL;
    Pages pages;
    Py_buffer rows = {0}, picks_view = {0};
    Picks picks;
    PyObject *parts[3] = {NULL}, *result = NULL;
    ColumnRows out = {0};
    if (!hold_pages(source, kind, &pages))
        return NULL;
    if (!numbers_of(rows_object, &rows, 8, pages.count) ||
        !open_picks(picks_object, &picks_view, &picks))
        goto end;
    int64_t total = count_rows(&rows, pages.count), each = width < 0 ? -width : width;
    int decided = total >= 0 && picks.count <= total && each <= OFFSET_MAX;
    if (decided) {
        uint64_t count = (uint64_t)(picks.pairs ? picks.count : total);
        if (width)
            out.values.room = count * (uint64_t)each;
        else if (picks.pairs)
            out.values.is_growing = 1;
        else
            out.values.room = room_for(&pages, COLUMN_HEAD, 0, total);
        /* A page has all its values: no more can come out than is in there. */
        decided = out.values.room <= pages.bytes;
        if (decided) {
            if (!(out.validity = new_bytes(&parts[0], (count + 7) / 8)) ||
                !(out.values.offsets = new_bytes(&parts[1], width ? 0 : 4 * (count + 1))) ||
                (!out.values.is_growing &&
                    !(out.values.data = new_bytes(&parts[2], out.values.room))))
                goto end;
            memset(out.validity, 255, (count + 7) / 8);
            if (count % 8)
                out.validity[count / 8] = (uint8_t)((1 << count % 8) - 1);
            if (pages.bytes > RELEASE_BYTES) {
                Py_BEGIN_ALLOW_THREADS
                decided = join_column_pages(&pages, rows.buf, number, width, &picks, &out);
                Py_END_ALLOW_THREADS
            } else {
                decided = join_column_pages(&pages, rows.buf, number, width, &picks, &out);
            }
            if (decided && !end_data(&out.values, &parts[2]))
                goto end;
        }
    }
    result = decided ? Py_BuildValue("(OOO)", out.has_nulls ? parts[0] : Py_None,
                           width ? Py_None : parts[1], parts[2])
                     : undecided();
end:
    if (out.values.is_growing)
        free(out.values.data);
    for (int n = 0; n < 3; n++)
        Py_XDECREF(parts[n]);
    if (picks_view.obj)
        PyBuffer_Release(&picks_view);
    if (rows.obj)
        PyBuffer_Release(&rows);
    release_pages(&pages);
    return result;
}

PyDoc_STRVAR(search_doc,
    "search(pages, rows, keys, places)\n--\n\n"
    "Return the rows of some keys as pairs of page and row (int32, as bytes); None if undecided.\n\n"
    "`pages` is a list of payloads of key pages, `places` (int64) the page of each key, rising.");

static PyObject *search(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *source, *rows_object, *keys, *places_object, *result = NULL;
    if (!PyArg_ParseTuple(args, "OOO!O:search", &source, &rows_object, &PyList_Type, &keys,
            &places_object))
        return NULL;
    Held pages;
    Py_buffer rows = {0}, places = {0};
    Py_ssize_t room = 0, used = 0, opened = -1;
    int32_t *pairs = NULL;
    if (!hold(source, &pages))
        return NULL;
    if (!numbers_of(rows_object, &rows, 8, pages.count) ||
        !numbers_of(places_object, &places, 8, PyList_Size(keys)))
        goto end;
    KeyPage page;
    for (Py_ssize_t n = 0; n < PyList_Size(keys); n++) {
        int64_t place = ((const int64_t *)places.buf)[n], first, last;
        PyObject *key = PyList_GetItem(keys, n);
        char *bytes;
        Py_ssize_t size;
        if (key == NULL || PyBytes_AsStringAndSize(key, &bytes, &size) < 0)
            goto end;
        if (place < 0 || place >= pages.count || place > INT32_MAX || place < opened)
            goto unknown;
        if (place != opened) {
            const Py_buffer *view = &pages.views[place];
            if (!open_key_page(view->buf, view->len, ((const int64_t *)rows.buf)[place], &page) ||
                !rows_are_valid(&page))
                goto unknown;
            opened = place;
        }
        if (!find_in_page(&page, (const uint8_t *)bytes, size, &first, &last) || last > INT32_MAX)
            goto unknown;
        if (used + last - first > room) {
            room = 2 * (used + last - first) + PyList_Size(keys);
            int32_t *grown = PyMem_Realloc(pairs, (size_t)room * 8);
            if (grown == NULL) {
                PyErr_NoMemory();
                goto end;
            }
            pairs = grown;
        }
        for (; first < last; first++, used++) {
            pairs[2 * used] = (int32_t)place;
            pairs[2 * used + 1] = (int32_t)first;
        }
    }
    result = PyBytes_FromStringAndSize((const char *)pairs, used * 8);
    goto end;
unknown:
    result = undecided();
end:
    PyMem_Free(pairs);
    if (places.obj)
        PyBuffer_Release(&places);
    if (rows.obj)
        PyBuffer_Release(&rows);
    release(&pages);
    return result;
}

/* --- small things ------------------------------------------------------------------------- */

/* Whether a filter of so many blocks may have a key with this hash. */
static inline int filter_has(const uint8_t *filter, uint64_t blocks, uint64_t hash)
{
    static const uint32_t odd[8] = {0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1,
        0xD6E8FEB9, 0xA5CB9243, 0x5851F42D};
    const uint8_t *block = filter + ((hash >> 32) * blocks >> 32) * FILTER_BLOCK;
    uint32_t low = (uint32_t)hash, missing = 0;
    for (int word = 0; word < 8; word++)
        missing |= ~u32_at(block + 4 * word) >> (low * odd[word] >> 27) & 1;
    return !missing;
}

/* The blocks of a filter; 0 with an error if it is none. */
static uint64_t filter_blocks(Py_ssize_t size)
{
    uint64_t blocks = (uint64_t)size / FILTER_BLOCK;
    if (blocks && blocks <= UINT32_MAX)
        return blocks;
    PyErr_SetString(PyExc_ValueError, "not a filter");
    return 0;
}

PyDoc_STRVAR(may_have_doc,
    "may_have(filter, key_hash)\n--\n\n"
    "Whether a filter may have a key with this hash.");

static PyObject *may_have(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *data;
    Py_ssize_t size;
    unsigned long long hash;
    if (!PyArg_ParseTuple(args, "y#K:may_have", &data, &size, &hash))
        return NULL;
    uint64_t blocks = filter_blocks(size);
    return blocks ? PyBool_FromLong(filter_has((const uint8_t *)data, blocks, hash)) : NULL;
}

PyDoc_STRVAR(may_have_each_doc,
    "may_have_each(filters, hashes)\n--\n\n"
    "Whether each of a list of filters may have a key with each of some hashes (uint64): a byte\n"
    "for each, filter by filter.");

static PyObject *may_have_each(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *list, *found = NULL;
    Py_buffer hashes;
    Held filters;
    if (!PyArg_ParseTuple(args, "Oy*:may_have_each", &list, &hashes))
        return NULL;
    if (!hold(list, &filters))
        goto end;
    Py_ssize_t count = hashes.len / 8;
    uint8_t *out = new_bytes(&found, (uint64_t)filters.count * (uint64_t)count);
    for (Py_ssize_t n = 0; out != NULL && n < filters.count; n++) {
        uint64_t blocks = filter_blocks(filters.views[n].len);
        if (!blocks) {
            Py_DECREF(found);
            found = NULL;
            break;
        }
        for (Py_ssize_t at = 0; at < count; at++)
            *out++ = (uint8_t)filter_has(
                filters.views[n].buf, blocks, u64_at((const uint8_t *)hashes.buf + 8 * at));
    }
    release(&filters);
end:
    PyBuffer_Release(&hashes);
    return found;
}

PyDoc_STRVAR(key_place_doc,
    "key_place(offsets, data, first, count, key, above)\n--\n\n"
    "Return how many of the sorted keys [first, first + count) of an Arrow array are below a key,\n"
    "with `above` also those that equal it; None if undecided.");

static PyObject *key_place(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer offsets, data, key;
    long long first, count;
    int above;
    if (!PyArg_ParseTuple(
            args, "y*y*LLy*p:key_place", &offsets, &data, &first, &count, &key, &above))
        return NULL;
    long long known = offsets.len / 4;
    int64_t place = -1;
    if (first >= 0 && count >= 0 && count < OFFSET_MAX && first <= known &&
        count + 1 <= known - first) {
        /* A page whose data end where the buffer does: offsets are checked as they are used. */
        KeyPage page = {.rows = (uint32_t)count, .data = data.buf};
        page.data_size = data.len > OFFSET_MAX ? OFFSET_MAX : (uint32_t)data.len;
        page.offsets = (const uint8_t *)offsets.buf + 4 * first;
        place = key_bound(&page, key.buf, key.len, 0, above);
    }
    PyBuffer_Release(&key);
    PyBuffer_Release(&data);
    PyBuffer_Release(&offsets);
    return place < 0 ? undecided() : PyLong_FromLongLong(place);
}

PyDoc_STRVAR(bytes_list_doc,
    "bytes_list(offsets, data, first, count)\n--\n\n"
    "Return the values [first, first + count) of an Arrow array without nulls, as a list of\n"
    "bytes; None if undecided.");

static PyObject *bytes_list(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer offsets, data;
    long long first, count;
    if (!PyArg_ParseTuple(args, "y*y*LL:bytes_list", &offsets, &data, &first, &count))
        return NULL;
    PyObject *values = NULL;
    long long known = offsets.len / 4;
    if (first < 0 || count < 0 || first > known || count + 1 > known - first) {
        values = undecided();
        goto end;
    }
    values = PyList_New(count);
    const uint8_t *ends = (const uint8_t *)offsets.buf + 4 * first;
    for (long long n = 0; values != NULL && n < count; n++) {
        int32_t from = i32_at(ends + 4 * n), to = i32_at(ends + 4 * n + 4);
        if (from < 0 || from > to || to > data.len) {
            Py_DECREF(values);
            values = undecided();
            break;
        }
        PyObject *value = PyBytes_FromStringAndSize((const char *)data.buf + from, to - from);
        if (value == NULL) {
            Py_DECREF(values);
            values = NULL;
        } else {
            PyList_SetItem(values, n, value);
        }
    }
end:
    PyBuffer_Release(&data);
    PyBuffer_Release(&offsets);
    return values;
}

/* --- codes of vectors --------------------------------------------------------------------- */

/* Sums of products of codes and weights: whole numbers, so that their order does not matter. The
 * caller chooses weights of which no sum of `dimensions` products leaves int32. */
typedef int32_t (*Product)(const uint8_t *codes, const int16_t *weights, Py_ssize_t dimensions);

static int32_t product_plain(const uint8_t *codes, const int16_t *weights, Py_ssize_t dimensions)
{
    int32_t sum = 0;
    for (Py_ssize_t n = 0; n < dimensions; n++)
        sum += (int32_t)codes[n] * weights[n];
    return sum;
}

#ifdef HAS_SSE42
__attribute__((target("avx2"))) static int32_t product_avx2(
    const uint8_t *codes, const int16_t *weights, Py_ssize_t dimensions)
{
    __m256i first = _mm256_setzero_si256(), second = first;
    Py_ssize_t n = 0;
    for (; n + 32 <= dimensions; n += 32) {
        __m256i low = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(codes + n)));
        __m256i high = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(codes + n + 16)));
        const __m256i *by = (const __m256i *)(weights + n);
        first = _mm256_add_epi32(first, _mm256_madd_epi16(low, _mm256_loadu_si256(by)));
        second = _mm256_add_epi32(second, _mm256_madd_epi16(high, _mm256_loadu_si256(by + 1)));
    }
    first = _mm256_add_epi32(first, second);
    __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(first), _mm256_extracti128_si256(first, 1));
    sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0x4E));
    sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0xB1));
    return _mm_cvtsi128_si32(sums) + product_plain(codes + n, weights + n, dimensions - n);
}
#endif

#ifdef HAS_SSE42
__attribute__((target("avx512bw,avx512vl"))) static int32_t product_avx512(
    const uint8_t *codes, const int16_t *weights, Py_ssize_t dimensions)
{
    __m512i first = _mm512_setzero_si512(), second = first;
    Py_ssize_t n = 0;
    for (; n + 64 <= dimensions; n += 64) {
        __m512i low = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(codes + n)));
        __m512i high = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(codes + n + 32)));
        first = _mm512_add_epi32(first, _mm512_madd_epi16(low, _mm512_loadu_si512(weights + n)));
        second = _mm512_add_epi32(
            second, _mm512_madd_epi16(high, _mm512_loadu_si512(weights + n + 32)));
    }
    for (; n < dimensions; n += 32) {
        __mmask32 mask = dimensions - n < 32 ? ((__mmask32)1 << (dimensions - n)) - 1 : ~0u;
        __m512i rest = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(mask, codes + n));
        first = _mm512_add_epi32(
            first, _mm512_madd_epi16(rest, _mm512_maskz_loadu_epi16(mask, weights + n)));
    }
    return _mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
}
#endif

static Product product_here(void)
{
#ifdef HAS_SSE42
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return product_avx512;
    if (__builtin_cpu_supports("avx2"))
        return product_avx2;
#endif
    return product_plain;
}

typedef struct {
    float far;
    uint32_t ordinal;
    int64_t source;
} Near;

static inline int is_nearer(const Near *a, const Near *b)
{
    if (a->far != b->far)
        return a->far < b->far;
    return a->source != b->source ? a->source < b->source : a->ordinal < b->ordinal;
}

/* The nearest rows so far: a heap with the farthest of them on top. */
typedef struct {
    Near *rows;
    Py_ssize_t count, most;
} Nearest;

static void sink(Nearest *best, Py_ssize_t at, Py_ssize_t count)
{
    Near moved = best->rows[at];
    for (Py_ssize_t below = 2 * at + 1; below < count; at = below, below = 2 * at + 1) {
        if (below + 1 < count && is_nearer(&best->rows[below], &best->rows[below + 1]))
            below++;
        if (!is_nearer(&moved, &best->rows[below]))
            break;
        best->rows[at] = best->rows[below];
    }
    best->rows[at] = moved;
}

static void add_near(Nearest *best, Near row)
{
    if (best->count < best->most) {
        best->rows[best->count++] = row;
        if (best->count == best->most)
            for (Py_ssize_t at = best->most / 2; at-- > 0;)
                sink(best, at, best->count);
    } else if (is_nearer(&row, best->rows)) {
        best->rows[0] = row;
        sink(best, 0, best->count);
    }
}

/* Put the nearest first. */
static void sort_nearest(Nearest *best)
{
    for (Py_ssize_t at = best->count / 2; at-- > 0;)
        sink(best, at, best->count);
    for (Py_ssize_t end = best->count; end-- > 1;) {
        Near last = best->rows[end];
        best->rows[end] = best->rows[0];
        best->rows[0] = last;
        sink(best, 0, end);
    }
}

/* The lists of one segment, and the query in its codes. */
typedef struct {
    Held lists; /* each by itself, or one buffer that has them all at `spans` */
    Py_buffer spans, weights, inside;
    float base, step;
} CodedLists;

static Py_ssize_t count_lists(const CodedLists *source)
{
    return source->spans.obj ? source->spans.len / 16 : source->lists.count;
}

/* The bytes of a list; 0 if it is not within its buffer. */
static int list_of(const CodedLists *source, Py_ssize_t number, const uint8_t **data, int64_t *size)
{
    const Py_buffer *view = &source->lists.views[source->spans.obj ? 0 : number];
    int64_t start = 0, end = view->len;
    if (source->spans.obj) {
        memcpy(&start, (const uint8_t *)source->spans.buf + 16 * number, 8);
        memcpy(&end, (const uint8_t *)source->spans.buf + 16 * number + 8, 8);
        if (start < 0 || start > end || end > view->len)
            return 0;
    }
    *data = (const uint8_t *)view->buf + start;
    *size = end - start;
    return 1;
}

static void release_coded(CodedLists *source)
{
    release(&source->lists);
    if (source->spans.obj)
        PyBuffer_Release(&source->spans);
    if (source->weights.obj)
        PyBuffer_Release(&source->weights);
    if (source->inside.obj)
        PyBuffer_Release(&source->inside);
}

static int hold_coded(PyObject *tuple, Py_ssize_t dimensions, CodedLists *source)
{
    PyObject *lists, *spans, *weights, *inside;
    double base, step;
    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "a tuple for each source is expected");
        return 0;
    }
    if (!PyArg_ParseTuple(
            tuple, "OOOddO:nearest_codes", &lists, &spans, &weights, &base, &step, &inside))
        return 0;
    source->base = (float)base;
    source->step = (float)step;
    if (!hold(lists, &source->lists))
        return 0;
    if (spans != Py_None) {
        if (PyObject_GetBuffer(spans, &source->spans, PyBUF_SIMPLE) < 0)
            return 0;
        if (source->lists.count != 1) {
            PyErr_SetString(PyExc_ValueError, "spans are those of one buffer");
            return 0;
        }
    }
    return numbers_of(weights, &source->weights, 2, dimensions) &&
           (inside == Py_None || PyObject_GetBuffer(inside, &source->inside, PyBUF_SIMPLE) == 0);
}

/* Compare the rows of a list; 0 if it is not one, or has a row that the mask does not know. */
static int add_list(Nearest *best, const CodedLists *source, int64_t number, Py_ssize_t list,
    Py_ssize_t dimensions, int is_product)
{
    Product product = product_here();
    const uint8_t *data;
    int64_t size, each = 8 + dimensions;
    if (!list_of(source, list, &data, &size) || size < 4 || (size - 4) % each)
        return 0;
    int64_t count = (size - 4) / each;
    const uint8_t *ordinals = data + 4, *squares = ordinals + 4 * count;
    const uint8_t *codes = squares + 4 * count, *inside = source->inside.buf;
    for (int64_t row = 0; row < count; row++, codes += dimensions) {
        Near near = {.ordinal = u32_at(ordinals + 4 * row), .source = number};
        if (source->inside.obj) {
            if (near.ordinal >= source->inside.len)
                return 0;
            if (!inside[near.ordinal])
                continue;
        }
        float far = (float)product(codes, source->weights.buf, dimensions) * source->step;
        far = far + source->base;
        float square;
        memcpy(&square, squares + 4 * row, 4);
        near.far = is_product ? -far : square - 2 * far;
        if (near.far - near.far == 0 && (best->count < best->most || near.far <= best->rows->far))
            add_near(best, near);
    }
    return 1;
}

static int add_lists(Nearest *best, const CodedLists *sources, Py_ssize_t count,
    Py_ssize_t dimensions, int is_product)
{
    for (Py_ssize_t n = 0; n < count; n++)
        for (Py_ssize_t list = 0; list < count_lists(&sources[n]); list++)
            if (!add_list(best, &sources[n], n, list, dimensions, is_product))
                return 0;
    sort_nearest(best);
    return 1;
}

static PyObject *nearest_result(const Nearest *best)
{
    PyObject *parts[3] = {NULL}, *result = NULL;
    uint8_t *sources = new_bytes(&parts[0], 8 * (uint64_t)best->count);
    uint8_t *ordinals = sources ? new_bytes(&parts[1], 4 * (uint64_t)best->count) : NULL;
    uint8_t *far = ordinals ? new_bytes(&parts[2], 4 * (uint64_t)best->count) : NULL;
    if (far) {
        for (Py_ssize_t n = 0; n < best->count; n++) {
            memcpy(sources + 8 * n, &best->rows[n].source, 8);
            memcpy(ordinals + 4 * n, &best->rows[n].ordinal, 4);
            memcpy(far + 4 * n, &best->rows[n].far, 4);
        }
        result = Py_BuildValue("(OOO)", parts[0], parts[1], parts[2]);
    }
    for (int n = 0; n < 3; n++)
        Py_XDECREF(parts[n]);
    return result;
}

PyDoc_STRVAR(nearest_codes_doc,
    "nearest_codes(sources, dimensions, most, is_product)\n--\n\n"
    "Return the nearest rows of vector lists, the nearest first: their sources (int64), ordinals\n"
    "(uint32) and distances to their codes (float32), as bytes; None if undecided.\n\n"
    "A source is (lists, spans, weights, base, step, inside): buffers as they are stored, or one\n"
    "and where each list begins and ends in it (int64); the query by dimension (int16); the numbers\n"
    "that turn sums of products into distances; and a byte for each row of the segment that is not\n"
    "0 if the row may be in the result, or None.");

static PyObject *nearest_codes(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *list, *result = NULL;
    Py_ssize_t dimensions, most;
    int is_product, decided;
    if (!PyArg_ParseTuple(
            args, "O!nnp:nearest_codes", &PyList_Type, &list, &dimensions, &most, &is_product))
        return NULL;
    Py_ssize_t count = PyList_Size(list), held = 0, rows = 0;
    if (dimensions < 1 || dimensions > INT32_MAX / 255 || most < 1)
        return undecided();
    CodedLists *sources = PyMem_Calloc(count ? count : 1, sizeof(CodedLists));
    Nearest best = {0};
    if (sources == NULL)
        return PyErr_NoMemory();
    for (; held < count; held++) {
        PyObject *tuple = PyList_GetItem(list, held);
        if (tuple == NULL || !hold_coded(tuple, dimensions, &sources[held])) {
            release_coded(&sources[held]);
            goto end;
        }
        for (Py_ssize_t n = 0; n < sources[held].lists.count; n++)
            rows += sources[held].lists.views[n].len / (8 + dimensions);
    }
    best.most = most < rows ? most : rows ? rows : 1;
    if ((best.rows = PyMem_Malloc((size_t)best.most * sizeof(Near))) == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    if (rows * (8 + dimensions) > RELEASE_BYTES) {
        Py_BEGIN_ALLOW_THREADS
        decided = add_lists(&best, sources, count, dimensions, is_product);
        Py_END_ALLOW_THREADS
    } else {
        decided = add_lists(&best, sources, count, dimensions, is_product);
    }
    result = decided ? nearest_result(&best) : undecided();
end:
    PyMem_Free(best.rows);
    while (held-- > 0)
        release_coded(&sources[held]);
    PyMem_Free(sources);
    return result;
}

/* --- files -------------------------------------------------------------------------------- */

#ifndef _WIN32

PyDoc_STRVAR(read_ranges_doc,
    "read_ranges(fd, ranges)\n--\n\n"
    "Return the bytes of [start, end) for each of a list of pairs; None if the file does not\n"
    "return them all at once.");

static PyObject *read_ranges(PyObject *Py_UNUSED(module), PyObject *args)
{
    int fd;
    PyObject *ranges;
    if (!PyArg_ParseTuple(args, "iO:read_ranges", &fd, &ranges))
        return NULL;
    Py_ssize_t count = PySequence_Size(ranges);
    if (count < 0)
        return NULL;
    struct Range { char *target; long long start; size_t size; } few[8], *all = few;
    if (count > 8 && (all = PyMem_Calloc(count, sizeof *all)) == NULL)
        return PyErr_NoMemory();
    PyObject *bodies = PyList_New(count);
    int is_whole = 1;
    for (Py_ssize_t n = 0; bodies != NULL && n < count; n++) {
        long long start, end;
        PyObject *range = PySequence_GetItem(ranges, n), *body = NULL;
        if (range != NULL && PyTuple_Check(range) && PyArg_ParseTuple(range, "LL", &start, &end)) {
            if (start < 0 || end < start || end - start > PY_SSIZE_T_MAX)
                PyErr_SetString(PyExc_ValueError, "not a range");
            else
                body = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(end - start));
        } else if (range != NULL && !PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "a range is a pair of numbers");
        }
        Py_XDECREF(range);
        if (body == NULL) {
            Py_DECREF(bodies);
            bodies = NULL;
            break;
        }
        all[n].target = PyBytes_AsString(body);
        all[n].start = start;
        all[n].size = (size_t)(end - start);
        PyList_SetItem(bodies, n, body);
    }
    if (bodies != NULL) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t n = 0; is_whole && n < count; n++)
            is_whole = pread(fd, all[n].target, all[n].size, (off_t)all[n].start) ==
                       (ssize_t)all[n].size;
        Py_END_ALLOW_THREADS
    }
    if (all != few)
        PyMem_Free(all);
    if (bodies == NULL || is_whole)
        return bodies;
    Py_DECREF(bodies);
    return undecided();
}

/* Size, inode, device and times of the file at a path; 0 if there is no regular file. */
static int identify(const char *path, int64_t identity[7])
{
    struct stat found;
    if (stat(path, &found) || !S_ISREG(found.st_mode))
        return 0;
#ifdef __APPLE__
    struct timespec changed = found.st_ctimespec, modified = found.st_mtimespec;
#else
    struct timespec changed = found.st_ctim, modified = found.st_mtim;
#endif
    int64_t numbers[7] = {found.st_size, (int64_t)found.st_ino, (int64_t)found.st_dev,
        modified.tv_sec, modified.tv_nsec, changed.tv_sec, changed.tv_nsec};
    memcpy(identity, numbers, sizeof numbers);
    return 1;
}

PyDoc_STRVAR(file_identity_doc,
    "file_identity(path)\n--\n\n"
    "Return size, inode, device and times of the file at a path (UTF-8), packed as bytes; None\n"
    "if there is no regular file.");

static PyObject *file_identity(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *path;
    if (!PyArg_ParseTuple(args, "s:file_identity", &path))
        return NULL;
    int64_t identity[7];
    int is_file;
    Py_BEGIN_ALLOW_THREADS
    is_file = identify(path, identity);
    Py_END_ALLOW_THREADS
    return is_file ? PyBytes_FromStringAndSize((const char *)identity, sizeof identity)
                   : undecided();
}

/* Memory that calls use one after the other; taken and put back with the GIL held. */
typedef struct {
    uint8_t *bytes;
    size_t room;
} Scratch;

static Scratch spares[SPARES];

static Scratch take_scratch(void)
{
    Scratch mine = {0};
    for (int n = 0; mine.bytes == NULL && n < SPARES; n++)
        if (spares[n].bytes != NULL) {
            mine = spares[n];
            spares[n].bytes = NULL;
        }
    return mine;
}

static void put_back(Scratch *mine)
{
    for (int n = 0; mine->room <= SPARE_BYTES && n < SPARES; n++)
        if (spares[n].bytes == NULL) {
            spares[n] = *mine;
            return;
        }
    free(mine->bytes);
}

/* Make room for so many bytes, without keeping those that are there. No GIL needed. */
static uint8_t *scratch_of(Scratch *mine, size_t size)
{
    if (mine->room < size) {
        free(mine->bytes);
        mine->room = size + size / 2;
        mine->bytes = malloc(mine->room);
        if (mine->bytes == NULL)
            mine->room = 0;
    }
    return mine->bytes;
}

/* The file of a segment that is open, and where the blocks of its pages are. */
typedef struct {
    int fd;
    const char *path;
    Py_buffer identity, bounds;
    int columns; /* blocks of a page besides that of the keys */
} SegmentFile;

static void release_file(SegmentFile *file)
{
    if (file->bounds.obj)
        PyBuffer_Release(&file->bounds);
    if (file->identity.obj)
        PyBuffer_Release(&file->identity);
}

/* Whether the path still names the open file. */
static int is_current(const SegmentFile *file)
{
    int64_t identity[7];
    return identify(file->path, identity) && file->identity.len == sizeof identity &&
           !memcmp(identity, file->identity.buf, sizeof identity);
}

/* The rows of a page, followed by start and end of each of its blocks; NULL if they are outside
 * of the file, or too large to be read at once. */
static const int64_t *bounds_of(const SegmentFile *file, int64_t page)
{
    size_t width = 3 + 2 * (size_t)file->columns;
    int64_t pages = (int64_t)((size_t)file->bounds.len / (8 * width));
    if (page < 0 || page >= pages || file->identity.len < 8)
        return NULL;
    const int64_t *bounds = (const int64_t *)file->bounds.buf + (size_t)page * width;
    int64_t size = *(const int64_t *)file->identity.buf, total = 0;
    for (size_t n = 1; n < width; n += 2) {
        int64_t start = bounds[n], end = bounds[n + 1];
        if (start < 0 || end < start || end > size || (total += end - start) > PAGE_BYTES_MAX)
            return NULL;
    }
    return bounds[0] > 0 && bounds[0] < OFFSET_MAX ? bounds : NULL;
}

static int read_whole(int fd, uint8_t *target, int64_t start, int64_t end)
{
    return pread(fd, target, (size_t)(end - start), (off_t)start) == (ssize_t)(end - start);
}

/* Read all blocks of a page, one behind the other; NULL if the file does not return them. */
static uint8_t *read_page(const SegmentFile *file, const int64_t *bounds, Scratch *scratch)
{
    int64_t total = 0;
    for (int n = 0; n <= file->columns; n++)
        total += bounds[2 * n + 2] - bounds[2 * n + 1];
    uint8_t *stored = scratch_of(scratch, (size_t)total), *at = stored;
    for (int n = 0; stored != NULL && n <= file->columns; n++) {
        int64_t start = bounds[2 * n + 1], end = bounds[2 * n + 2];
        if (start < end && !read_whole(file->fd, at, start, end))
            return NULL;
        at += end - start;
    }
    return stored;
}

PyDoc_STRVAR(get_row_doc,
    "get_row(fd, path, identity, bounds, columns, page, kinds, key, is_bytes)\n--\n\n"
    "Return (first, last, lsn, seq, kind, value, payloads, encoded, size) of a key in a page of\n"
    "an open file; None if undecided, or if the path (bytes) no longer names the file.\n\n"
    "`bounds` has for each page its rows, and start and end of its blocks (int64): of the keys,\n"
    "and of so many columns. `kinds` are those of the two sorts of blocks. The first five are\n"
    "those of `find_key`; if it is undecided, `first` is -1. `value` is that of `bytes_at` if the\n"
    "only column is of bytes (`is_bytes`), else None. `payloads` are those of the blocks; where a\n"
    "bit of `encoded` is set, the block as it is stored, as its codec is left to Python. `size`\n"
    "is how many bytes were read.");

static PyObject *get_row(PyObject *Py_UNUSED(module), PyObject *args)
{
    SegmentFile file = {0};
    Py_buffer key;
    long long number;
    int key_kind, column_kind, is_bytes;
    if (!PyArg_ParseTuple(args, "iyy*y*iL(ii)y*p:get_row", &file.fd, &file.path, &file.identity,
            &file.bounds, &file.columns, &number, &key_kind, &column_kind, &key, &is_bytes))
        return NULL;
    PyObject *payloads = NULL, *value = NULL, *result = NULL;
    uint8_t *stored = NULL;
    unsigned long long encoded = 0;
    int64_t first = 0, last = 0, lsn = 0;
    uint32_t seq = 0;
    int kind = 0, is_damaged = 0;
    Scratch scratch = take_scratch();
    const int64_t *bounds =
        file.columns >= 0 && file.columns < 64 ? bounds_of(&file, number) : NULL;
    if (bounds != NULL) {
        Py_BEGIN_ALLOW_THREADS
        if (is_current(&file))
            stored = read_page(&file, bounds, &scratch);
        Py_END_ALLOW_THREADS
    }
    if (stored != NULL && (payloads = PyTuple_New(file.columns + 1)) == NULL)
        goto end;
    const uint8_t *at = stored;
    for (int n = 0; payloads != NULL && !is_damaged && n <= file.columns; n++) {
        size_t size = (size_t)(bounds[2 * n + 2] - bounds[2 * n + 1]);
        PyObject *payload = size ? block_payload(at, size, n ? column_kind : key_kind)
                                 : PyBytes_FromStringAndSize(NULL, 0);
        if (payload == Py_None && size >= BLOCK_HEAD && at[9] == CODEC_ZSTD) {
            encoded |= 1ull << n;
            Py_DECREF(payload);
            payload = PyBytes_FromStringAndSize((const char *)at, (Py_ssize_t)size);
        }
        if (payload == NULL)
            goto end;
        is_damaged = payload == Py_None;
        PyTuple_SetItem(payloads, n, payload);
        at += size;
    }
    if (payloads == NULL || is_damaged) {
        result = undecided();
        goto end;
    }
    KeyPage page;
    char *bytes;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(PyTuple_GetItem(payloads, 0), &bytes, &size) < 0)
        goto end;
    if (encoded & 1 || !open_key_page((const uint8_t *)bytes, (size_t)size, bounds[0], &page) ||
        !find_in_page(&page, key.buf, (size_t)key.len, &first, &last)) {
        first = last = -1;
    } else if (first < last) {
        memcpy(&lsn, page.lsns + 8 * first, 8);
        seq = u32_at(page.seqs + 4 * first);
        kind = page.kinds[first];
    }
    if (is_bytes && file.columns == 1 && !encoded && first < last) {
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(payloads, 1), &bytes, &size) < 0)
            goto end;
        value = value_at((const uint8_t *)bytes, (size_t)size, first, bounds[0]);
    } else {
        value = undecided();
    }
    if (value != NULL)
        result = Py_BuildValue("(LLLIiOOKn)", (long long)first, (long long)last, (long long)lsn, seq,
            kind, value, payloads, encoded, (Py_ssize_t)(at - stored));
end:
    Py_XDECREF(value);
    Py_XDECREF(payloads);
    put_back(&scratch);
    PyBuffer_Release(&key);
    release_file(&file);
    return result;
}

/* The rows of some pages that are put together: keys and stamps, and each column. */
typedef struct {
    KeyRows keys;
    ColumnRows *columns;
    int count;
    int64_t room; /* in rows */
    Scratch stored, payload;
    int32_t *pairs; /* of one page, its number first */
    size_t pairs_room;
    int64_t bytes_read;
} Reading;

static void release_reading(Reading *out)
{
    for (int n = 0; out->columns != NULL && n < out->count; n++) {
        free(out->columns[n].values.offsets);
        free(out->columns[n].values.data);
        free(out->columns[n].validity);
    }
    free(out->columns);
    free(out->keys.keys.offsets);
    free(out->keys.keys.data);
    free(out->keys.lsns);
    free(out->keys.seqs);
    free(out->keys.kinds);
    free(out->pairs);
    free(out->payload.bytes);
}

static int resized(void *slot, size_t size)
{
    void *before, *after;
    memcpy(&before, slot, sizeof before);
    after = realloc(before, size);
    if (after != NULL)
        memcpy(slot, &after, sizeof after);
    return after != NULL;
}

/* Make room for more rows. */
static int reserve(Reading *out, int64_t more)
{
    int64_t needed = out->keys.keys.rows + more;
    if (needed >= OFFSET_MAX)
        return 0;
    if (needed <= out->room)
        return 1;
    size_t room = (size_t)(needed + needed / 2 + 64), before = (size_t)(out->room + 7) / 8;
    if (!resized(&out->keys.keys.offsets, 4 * (room + 1)) || !resized(&out->keys.lsns, 8 * room) ||
        !resized(&out->keys.seqs, 4 * room) || !resized(&out->keys.kinds, room))
        return 0;
    for (int n = 0; n < out->count; n++) {
        if (!resized(&out->columns[n].values.offsets, 4 * (room + 1)) ||
            !resized(&out->columns[n].validity, (room + 7) / 8))
            return 0;
        memset(out->columns[n].validity + before, 255, (room + 7) / 8 - before);
    }
    out->room = (int64_t)room;
    return 1;
}

/* The payload of a stored block, valid until the next one; 0 if it is undecided. */
static int unpack(
    Reading *out, const uint8_t *stored, size_t size, int kind, const uint8_t **payload, size_t *raw)
{
    Block block;
    if (!open_block(stored, size, kind, &block))
        return 0;
    *raw = block.raw_length;
    *payload = block.stored;
    if (block.codec == CODEC_NONE)
        return 1;
    if (*raw > PAGE_BYTES_MAX)
        return 0;
    uint8_t *target = scratch_of(&out->payload, *raw);
    *payload = target;
    return target != NULL && lz4_decode(block.stored, block.length, target, *raw);
}

/* Rows of a page that has no block of a column: nulls. */
static int append_nulls(ColumnRows *out, int64_t width, int64_t count)
{
    static const uint8_t zeros[256];
    Variable *values = &out->values;
    for (int64_t n = 0; n < count; n++, values->rows++) {
        out->validity[values->rows >> 3] &= (uint8_t)~(1 << (values->rows & 7));
        if (!width)
            values->offsets[values->rows] = (int32_t)values->used;
        for (int64_t left = width; left > 0; left -= (int64_t)sizeof zeros)
            if (!append_range(values, zeros, left < 256 ? (uint64_t)left : sizeof zeros))
                return 0;
    }
    out->has_nulls |= count > 0;
    return 1;
}

typedef struct {
    const char *bytes;
    Py_ssize_t size;
} Key;

/* Find the rows of keys in a page; their number, or -1. */
static int64_t pick_pairs(Reading *out, const KeyPage *page, const Key *keys, Py_ssize_t count)
{
    size_t used = 0;
    for (Py_ssize_t n = 0; n < count; n++) {
        int64_t first, last;
        if (!find_in_page(page, (const uint8_t *)keys[n].bytes, (size_t)keys[n].size, &first, &last))
            return -1;
        if (used + (size_t)(last - first) > out->pairs_room) {
            out->pairs_room = 2 * (used + (size_t)(last - first)) + 16;
            if (!resized(&out->pairs, 8 * out->pairs_room))
                return -1;
        }
        for (; first < last; first++, used++) {
            out->pairs[2 * used] = 0;
            out->pairs[2 * used + 1] = (int32_t)first;
        }
    }
    return (int64_t)used;
}

/* Read a page, and append its rows, or those of some keys; 0 if undecided. */
static int append_page(Reading *out, const SegmentFile *file, int64_t number,
    const int64_t *columns, const Key *keys, Py_ssize_t key_count, const int kinds[2])
{
    const int64_t *bounds = bounds_of(file, number), *numbers = columns;
    const int64_t *widths = columns + out->count;
    const uint8_t *at = bounds ? read_page(file, bounds, &out->stored) : NULL, *payload;
    size_t size = at ? (size_t)(bounds[2] - bounds[1]) : 0, raw;
    KeyPage page;
    Picks picks = {0};
    if (at == NULL || !unpack(out, at, size, kinds[0], &payload, &raw) ||
        !open_key_page(payload, raw, bounds[0], &page) || !rows_are_valid(&page))
        return 0;
    int64_t rows = keys ? pick_pairs(out, &page, keys, key_count) : bounds[0];
    if (rows < 0 || !reserve(out, rows))
        return 0;
    picks.pairs = keys ? out->pairs : NULL;
    picks.count = keys ? (Py_ssize_t)rows : 0;
    if (rows && !append_keys(&out->keys, &page, 0, &picks))
        return 0;
    out->bytes_read += (int64_t)size;
    for (int n = 0; n < out->count; n++) {
        ColumnPage column;
        at += size;
        size = (size_t)(bounds[2 * n + 4] - bounds[2 * n + 3]);
        out->bytes_read += (int64_t)size;
        picks.at = 0;
        if (!rows)
            continue;
        if (!size) {
            if (!append_nulls(&out->columns[n], widths[n] < 0 ? -widths[n] : widths[n], rows))
                return 0;
            continue;
        }
        if (!unpack(out, at, size, kinds[1], &payload, &raw) ||
            !open_column_page(payload, raw, bounds[0], (int)numbers[n], widths[n], &column) ||
            (column.offsets && !offsets_rise(column.offsets, column.rows, column.data_size)) ||
            !append_column(&out->columns[n], &column, 0, widths[n], &picks))
            return 0;
    }
    return 1;
}

static PyObject *bytes_of(const void *data, uint64_t size)
{
    return PyBytes_FromStringAndSize(size ? data : "", (Py_ssize_t)size);
}

/* Append to a list, and give the reference away; 0 with an error. */
static int append_new(PyObject *list, PyObject *item)
{
    int failed = item == NULL || PyList_Append(list, item) < 0;
    Py_XDECREF(item);
    return !failed;
}

static PyObject *read_result(Reading *out, const int64_t *widths)
{
    uint64_t rows = (uint64_t)out->keys.keys.rows;
    PyObject *list = PyList_New(0);
    Variable *keys = &out->keys.keys;
    if (list == NULL)
        return NULL;
    if (!reserve(out, 1)) {
        Py_DECREF(list);
        return undecided();
    }
    keys->offsets[rows] = (int32_t)keys->used;
    int fine = append_new(list, bytes_of(keys->offsets, 4 * (rows + 1))) &&
               append_new(list, bytes_of(keys->data, keys->used)) &&
               append_new(list, bytes_of(out->keys.lsns, 8 * rows)) &&
               append_new(list, bytes_of(out->keys.seqs, 4 * rows)) &&
               append_new(list, bytes_of(out->keys.kinds, rows));
    for (int n = 0; fine && n < out->count; n++) {
        ColumnRows *column = &out->columns[n];
        PyObject *validity = Py_NewRef(Py_None), *offsets = Py_NewRef(Py_None);
        if (column->has_nulls) {
            Py_DECREF(validity);
            if (rows % 8)
                column->validity[rows / 8] &= (uint8_t)((1 << rows % 8) - 1);
            validity = bytes_of(column->validity, (rows + 7) / 8);
        }
        if (!widths[n]) {
            Py_DECREF(offsets);
            column->values.offsets[rows] = (int32_t)column->values.used;
            offsets = bytes_of(column->values.offsets, 4 * (rows + 1));
        }
        PyObject *data = bytes_of(column->values.data, column->values.used);
        if (validity != NULL && offsets != NULL && data != NULL)
            fine = append_new(list, PyTuple_Pack(3, validity, offsets, data));
        else
            fine = 0;
        Py_XDECREF(validity);
        Py_XDECREF(offsets);
        Py_XDECREF(data);
    }
    if (fine && append_new(list, PyLong_FromLongLong(out->bytes_read)))
        return list;
    Py_DECREF(list);
    return NULL;
}

/* The bytes of keys, which their tuple holds; NULL with an error. */
static Key *keys_of(PyObject *tuple)
{
    Py_ssize_t count = PyTuple_Size(tuple);
    Key *keys = PyMem_Calloc((size_t)count + 1, sizeof *keys);
    if (keys == NULL)
        PyErr_NoMemory();
    for (Py_ssize_t n = 0; keys != NULL && n < count; n++) {
        char *bytes;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(tuple, n), &bytes, &keys[n].size) < 0) {
            PyMem_Free(keys);
            return NULL;
        }
        keys[n].bytes = bytes;
    }
    return keys;
}

PyDoc_STRVAR(read_rows_doc,
    "read_rows(fd, path, identity, bounds, columns, kinds, pages, keys, counts)\n--\n\n"
    "Return [offsets, data, lsns, seqs, kinds, *columns, size] of rows in pages of an open file:\n"
    "of all, or of a tuple of sorted keys, of which `counts` says how many to search in each\n"
    "page. None if undecided, or if the path (bytes) no longer names the file.\n\n"
    "`bounds` and `kinds` are those of `get_row`; `columns`, `pages` and `counts` are of int64.\n"
    "`columns` has the number of each column, then their widths, which are those of\n"
    "`join_column`, as is the result of each. `size` is how many bytes were read.");

static PyObject *read_rows(PyObject *Py_UNUSED(module), PyObject *args)
{
    SegmentFile file = {0};
    Py_buffer columns, pages, counts = {0};
    PyObject *keys_object, *counts_object, *result = NULL;
    int kinds[2], decided = 0;
    if (!PyArg_ParseTuple(args, "iyy*y*y*(ii)y*OO:read_rows", &file.fd, &file.path, &file.identity,
            &file.bounds, &columns, &kinds[0], &kinds[1], &pages, &keys_object, &counts_object))
        return NULL;
    Reading out = {.count = columns.len / 16 > COLUMNS_MAX ? -1 : (int)(columns.len / 16)};
    Py_ssize_t count = pages.len / 8;
    Key *keys = NULL;
    file.columns = out.count;
    out.stored = take_scratch();
    out.keys.keys.is_growing = 1;
    if (keys_object != Py_None) {
        if (!PyTuple_Check(keys_object)) {
            PyErr_SetString(PyExc_TypeError, "a tuple of keys is expected");
            goto end;
        }
        if (!numbers_of(counts_object, &counts, 8, count) || !(keys = keys_of(keys_object)))
            goto end;
    }
    if (out.count >= 0 && count) {
        out.columns = calloc((size_t)out.count + 1, sizeof *out.columns);
        if (out.columns == NULL) {
            PyErr_NoMemory();
            goto end;
        }
        for (int n = 0; n < out.count; n++)
            out.columns[n].values.is_growing = 1;
        Py_ssize_t at = 0, left = keys ? PyTuple_Size(keys_object) : 0;
        Py_BEGIN_ALLOW_THREADS
        decided = is_current(&file);
        for (Py_ssize_t n = 0; decided && n < count; n++) {
            int64_t some = keys ? ((const int64_t *)counts.buf)[n] : 0;
            decided = some >= 0 && some <= left &&
                      append_page(&out, &file, ((const int64_t *)pages.buf)[n], columns.buf,
                          keys ? keys + at : NULL, (Py_ssize_t)some, kinds);
            at += (Py_ssize_t)some;
            left -= (Py_ssize_t)some;
        }
        Py_END_ALLOW_THREADS
    }
    result = decided ? read_result(&out, (const int64_t *)columns.buf + out.count) : undecided();
end:
    put_back(&out.stored);
    release_reading(&out);
    PyMem_Free(keys);
    if (counts.obj)
        PyBuffer_Release(&counts);
    PyBuffer_Release(&pages);
    PyBuffer_Release(&columns);
    release_file(&file);
    return result;
}

/* --- one row ------------------------------------------------------------------------------ */

enum { PAYLOAD, BYTES, TEXT, SIGNED, UNSIGNED, FLOAT, VECTOR };

/* A column of which one value is read. */
typedef struct {
    int64_t number, type, width, items; /* the width is that of `join_column` */
} ValueColumn;

/* Where the bytes of a value were put. */
typedef struct {
    size_t at, size;
    enum { IS_VALUE, IS_NULL, IS_PAYLOAD, IS_STORED } how;
} Value;

/* One row of a page: its stamp, and the bytes of its values one after the other. */
typedef struct {
    Scratch stored, payload, bytes;
    size_t used;
    int64_t first, last, lsn, read;
    uint32_t seq;
    int kind;
    Value values[64];
} Row;

static int keep_value(Row *row, Value *value, const uint8_t *bytes, size_t size)
{
    if (size > row->bytes.room - row->used) {
        size_t room = 2 * (row->used + size) + 1024;
        if (!resized(&row->bytes.bytes, room))
            return 0;
        row->bytes.room = room;
    }
    value->at = row->used;
    value->size = size;
    memcpy(row->bytes.bytes + row->used, bytes, size);
    row->used += size;
    return 1;
}

/* Check a stored block, and decompress it; 0 if undecided. */
static int unpack_block(Row *row, const uint8_t *stored, size_t size, int kind,
    const uint8_t **payload, size_t *raw)
{
    Block block;
    if (!open_block(stored, size, kind, &block))
        return 0;
    *raw = block.raw_length;
    *payload = block.stored;
    if (block.codec == CODEC_NONE)
        return 1;
    if (*raw > PAGE_BYTES_MAX)
        return 0;
    uint8_t *target = scratch_of(&row->payload, *raw);
    *payload = target;
    return target != NULL && lz4_decode(block.stored, block.length, target, *raw);
}

static const uint8_t *read_block(Row *row, const SegmentFile *file, const int64_t *bounds, int n)
{
    int64_t start = bounds[2 * n + 1], end = bounds[2 * n + 2];
    uint8_t *stored = scratch_of(&row->stored, (size_t)(end - start));
    row->read += end - start;
    return stored != NULL && read_whole(file->fd, stored, start, end) ? stored : NULL;
}

/* Find the only version of a key in a page. 1: it is there, or none is; 0: undecided; -1: several, or a
 * partial one. */
static int find_row(
    Row *row, const SegmentFile *file, const int64_t *bounds, int kind, const Py_buffer *key)
{
    const uint8_t *stored = read_block(row, file, bounds, 0), *payload;
    size_t raw;
    KeyPage page;
    if (stored == NULL ||
        !unpack_block(row, stored, (size_t)(bounds[2] - bounds[1]), kind, &payload, &raw) ||
        !open_key_page(payload, raw, bounds[0], &page) ||
        !find_in_page(&page, key->buf, (size_t)key->len, &row->first, &row->last))
        return 0;
    if (row->last - row->first > 1)
        return -1;
    if (row->first < row->last) {
        memcpy(&row->lsn, page.lsns + 8 * row->first, 8);
        row->seq = u32_at(page.seqs + 4 * row->first);
        row->kind = page.kinds[row->first];
    }
    return row->kind <= KIND_DELETE ? 1 : -1;
}

/* Read the value of a column; 0 if undecided. */
static int read_value(Row *row, const SegmentFile *file, const int64_t *bounds, int kind, int n,
    const ValueColumn *column)
{
    Value *value = &row->values[n];
    size_t size = (size_t)(bounds[2 * n + 4] - bounds[2 * n + 3]), raw;
    const uint8_t *stored, *payload;
    ColumnPage page;
    value->how = IS_NULL;
    if (!size)
        return 1;
    if ((stored = read_block(row, file, bounds, n + 1)) == NULL)
        return 0;
    if (size >= BLOCK_HEAD && stored[9] == CODEC_ZSTD) {
        value->how = IS_STORED;
        return keep_value(row, value, stored, size);
    }
    if (!unpack_block(row, stored, size, kind, &payload, &raw))
        return 0;
    int64_t first = -1, last = -1;
    if (column->type != PAYLOAD &&
        open_column_page(payload, raw, bounds[0], (int)column->number, column->width, &page)) {
        if (!is_valid(&page, (uint32_t)row->first))
            return 1;
        first = page.offsets ? i32_at(page.offsets + 4 * row->first)
                             : row->first * (int64_t)page.width;
        last = page.offsets ? i32_at(page.offsets + 4 * row->first + 4) : first + page.width;
    }
    if (first < 0 || first > last || last > page.data_size) { /* Python decodes it */
        value->how = IS_PAYLOAD;
        return keep_value(row, value, payload, raw);
    }
    value->how = IS_VALUE;
    return keep_value(row, value, page.data + first, (size_t)(last - first));
}

/* Read the row of a key; the states are those of `find_row`. No GIL needed. */
static int read_row(Row *row, const SegmentFile *file, const int64_t *bounds, const int kinds[2],
    const Py_buffer *key, const ValueColumn *columns)
{
    if (!is_current(file))
        return -1;
    int state = find_row(row, file, bounds, kinds[0], key);
    if (state != 1 || row->first == row->last || row->kind == KIND_DELETE)
        return state;
    for (int n = 0; n < file->columns; n++)
        if (!read_value(row, file, bounds, kinds[1], n, &columns[n]))
            return 0;
    return 1;
}

static PyObject *number_of(const uint8_t *bytes, int64_t type, size_t width)
{
    int64_t number = 0;
    if (type == FLOAT) {
        float single;
        double whole;
        memcpy(&single, bytes, sizeof single);
        if (width == sizeof single)
            return PyFloat_FromDouble((double)single);
        memcpy(&whole, bytes, sizeof whole);
        return PyFloat_FromDouble(whole);
    }
    memcpy(&number, bytes, width);
    if (type == UNSIGNED)
        return PyLong_FromUnsignedLongLong((unsigned long long)number);
    unsigned unused = 64 - 8 * (unsigned)width;
    return PyLong_FromLongLong((long long)((int64_t)((uint64_t)number << unused) >> unused));
}

/* A value as Python has it; None if it is undecided, which is another object than a null. */
static PyObject *value_object(const Row *row, const Value *value, const ValueColumn *column)
{
    const uint8_t *bytes = row->bytes.bytes + value->at;
    size_t width = column->items ? value->size / (size_t)column->items : value->size;
    if (value->how != IS_VALUE || column->type == BYTES)
        return PyBytes_FromStringAndSize((const char *)bytes, (Py_ssize_t)value->size);
    if (column->type == TEXT)
        return PyUnicode_DecodeUTF8((const char *)bytes, (Py_ssize_t)value->size, "strict");
    if (column->type != VECTOR)
        return number_of(bytes, column->type, width);
    PyObject *list = PyList_New((Py_ssize_t)column->items);
    for (int64_t n = 0; list != NULL && n < column->items; n++) {
        PyObject *item = number_of(bytes + (size_t)n * width, FLOAT, width);
        if (item == NULL) {
            Py_DECREF(list);
            return NULL;
        }
        PyList_SetItem(list, (Py_ssize_t)n, item);
    }
    return list;
}

static PyObject *row_values(
    const Row *row, const ValueColumn *columns, int count, unsigned long long left[2])
{
    PyObject *values = PyTuple_New(count);
    for (int n = 0; values != NULL && n < count; n++) {
        const Value *value = &row->values[n];
        if (value->how >= IS_PAYLOAD)
            left[value->how - IS_PAYLOAD] |= 1ull << n;
        PyObject *item = value->how == IS_NULL ? Py_NewRef(Py_None)
                                               : value_object(row, value, &columns[n]);
        if (item == NULL) {
            Py_DECREF(values);
            return NULL;
        }
        PyTuple_SetItem(values, n, item);
    }
    return values;
}

/* Whether numbers have a width that is read here, and vectors as many as their width says. */
static int columns_are_known(const ValueColumn *columns, int count)
{
    for (int n = 0; n < count; n++) {
        const ValueColumn *column = &columns[n];
        int64_t width = column->type == VECTOR ? -column->width : column->width;
        int64_t items = column->type == VECTOR ? column->items : 1;
        int is_variable = column->type == BYTES || column->type == TEXT;
        if (column->type < PAYLOAD || column->type > VECTOR || column->number < 0)
            return 0;
        if (column->type == PAYLOAD || (is_variable && !column->width && !column->items))
            continue;
        if (is_variable || items < 1 || width < 1 || width > OFFSET_MAX || width % items ||
            column->items != (column->type == VECTOR ? items : 0))
            return 0;
        int64_t each = width / items;
        int is_float = column->type == FLOAT || column->type == VECTOR;
        if (!(each == 4 || each == 8 || (!is_float && (each == 1 || each == 2))))
            return 0;
    }
    return 1;
}

PyDoc_STRVAR(get_values_doc,
    "get_values(fd, path, identity, bounds, columns, page, kinds, key)\n--\n\n"
    "Return (row, lsn, seq, kind, values, payloads, stored, size) of a key in a page of an open\n"
    "file, -1 as its row if it has none. None if undecided: it has several versions or a partial\n"
    "one, or the path no longer names the file; False if other rows of the page will be, too.\n\n"
    "The first five arguments and `kinds` are those of `get_row`, but `columns` has four int64 of\n"
    "each column: number, type (0 payload, 1 bytes, 2 text, 3 signed, 4 unsigned, 5 float,\n"
    "6 vector of floats), width as in `join_column`, and values of a vector, or 0. Bits of\n"
    "`payloads` say which values are payloads of their pages, those of `stored` which are blocks\n"
    "as they are stored. `size` is how many bytes were read.");

static PyObject *get_values(PyObject *Py_UNUSED(module), PyObject *args)
{
    SegmentFile file = {0};
    Py_buffer key, columns;
    long long number;
    int kinds[2], state = 0;
    if (!PyArg_ParseTuple(args, "iyy*y*y*L(ii)y*:get_values", &file.fd, &file.path,
            &file.identity, &file.bounds, &columns, &number, &kinds[0], &kinds[1], &key))
        return NULL;
    Row row;
    memset(&row, 0, offsetof(Row, values));
    const ValueColumn *known = columns.buf;
    file.columns = (int)(columns.len / (Py_ssize_t)sizeof *known);
    PyObject *values = NULL, *result = NULL;
    unsigned long long left[2] = {0, 0};
    const int64_t *bounds = NULL;
    if (columns.len < 64 * (Py_ssize_t)sizeof *known && columns_are_known(known, file.columns))
        bounds = bounds_of(&file, number);
    if (bounds != NULL) {
        row.stored = take_scratch();
        row.payload = take_scratch();
        row.bytes = take_scratch();
        Py_BEGIN_ALLOW_THREADS
        state = read_row(&row, &file, bounds, kinds, &key, known);
        Py_END_ALLOW_THREADS
    }
    int has_values = state == 1 && row.first < row.last && row.kind != KIND_DELETE;
    if (has_values && (values = row_values(&row, known, file.columns, left)) == NULL) {
        if (PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) {
            PyErr_Clear();
            state = 0;
        }
    }
    if (state == 1 && !PyErr_Occurred())
        result = Py_BuildValue("(LLIiOKKL)", row.first < row.last ? (long long)row.first : -1LL,
            (long long)row.lsn, row.seq, row.kind, values ? values : Py_None, left[0], left[1],
            (long long)row.read);
    else if (!PyErr_Occurred())
        result = state ? undecided() : Py_NewRef(Py_False);
    Py_XDECREF(values);
    put_back(&row.bytes);
    put_back(&row.payload);
    put_back(&row.stored);
    PyBuffer_Release(&columns);
    PyBuffer_Release(&key);
    release_file(&file);
    return result;
}

#endif

/* --- merging ------------------------------------------------------------------------------ */

#define PARTS_MAX 16
#define MERGED_ROWS_RELEASE 20000 /* fewer would wait longer for the GIL than they take */

/* One sorted part of a merge, and the row that is next. */
typedef struct {
    Py_buffer offsets, data, lsns, seqs;
    KeyPage page;
    int64_t base; /* the place of its first row among the rows of all parts */
    uint32_t row;
    const uint8_t *key;
    uint32_t size;
} Part;

static void release_parts(Part *parts, int count)
{
    for (int n = 0; n < count; n++) {
        PyBuffer_Release(&parts[n].offsets);
        PyBuffer_Release(&parts[n].data);
        PyBuffer_Release(&parts[n].lsns);
        PyBuffer_Release(&parts[n].seqs);
    }
}

/* Hold a part that Python gives as a tuple. 1: held, 0: an error, -1: of another shape. */
static int hold_part(PyObject *tuple, Part *part)
{
    long long first, count;
    if (!PyArg_ParseTuple(tuple, "y*y*LLy*y*:merge_places", &part->offsets, &part->data, &first,
                          &count, &part->lsns, &part->seqs))
        return 0;
    long long known = part->offsets.len / 4;
    memset(&part->page, 0, sizeof part->page);
    part->row = 0;
    if (first < 0 || count <= 0 || count >= OFFSET_MAX || first > known ||
        count + 1 > known - first || part->lsns.len != 8 * count || part->seqs.len != 4 * count) {
        release_parts(part, 1);
        return -1;
    }
    part->page.rows = (uint32_t)count;
    part->page.offsets = (const uint8_t *)part->offsets.buf + 4 * first;
    part->page.data = part->data.buf;
    part->page.data_size = part->data.len > OFFSET_MAX ? OFFSET_MAX : (uint32_t)part->data.len;
    return 1;
}

static int key_order(const uint8_t *a, uint32_t a_size, const uint8_t *b, uint32_t b_size)
{
    int order = memcmp(a, b, a_size < b_size ? a_size : b_size);
    return order ? order : (a_size > b_size) - (a_size < b_size);
}

/* Compare the versions of one key in two rows: the newest comes first. */
static int stamp_order(const Part *a, uint32_t a_row, const Part *b, uint32_t b_row)
{
    int64_t a_lsn = ((const int64_t *)a->lsns.buf)[a_row];
    int64_t b_lsn = ((const int64_t *)b->lsns.buf)[b_row];
    if (a_lsn != b_lsn)
        return a_lsn > b_lsn ? -1 : 1;
    uint32_t a_seq = ((const uint32_t *)a->seqs.buf)[a_row];
    uint32_t b_seq = ((const uint32_t *)b->seqs.buf)[b_row];
    return (a_seq < b_seq) - (a_seq > b_seq);
}

/* Compare the next row of a part with that of another: by key, and the newest first. */
static int row_order(const Part *a, const Part *b)
{
    int order = key_order(a->key, a->size, b->key, b->size);
    return order ? order : stamp_order(a, a->row, b, b->row);
}

/* Go to the next row; 0 if the rows are damaged or not in order. */
static int advance(Part *part)
{
    const uint8_t *before = part->key;
    uint32_t size = part->size;
    if (++part->row >= part->page.rows)
        return 1;
    if (!key_at(&part->page, part->row, &part->key, &part->size))
        return 0;
    int order = key_order(before, size, part->key, part->size);
    return order < 0 || (!order && stamp_order(part, part->row - 1, part, part->row) <= 0);
}

/* Write the places of all rows, or of the first row of each key, in order. -1: undecided. */
static int64_t merge_parts(Part *parts, int count, int every, int64_t *places)
{
    const uint8_t *last = NULL;
    uint32_t last_size = 0;
    int64_t found = 0;
    for (int n = 0; n < count; n++)
        if (!key_at(&parts[n].page, 0, &parts[n].key, &parts[n].size))
            return -1;
    for (;;) {
        Part *next = NULL;
        for (int n = 0; n < count; n++)
            if (parts[n].row < parts[n].page.rows &&
                (next == NULL || row_order(&parts[n], next) < 0))
                next = &parts[n];
        if (next == NULL)
            return found;
        if (every || last == NULL || key_order(last, last_size, next->key, next->size))
            places[found++] = next->base + next->row;
        last = next->key;
        last_size = next->size;
        if (!advance(next))
            return -1;
    }
}

PyDoc_STRVAR(merge_places_doc,
    "merge_places(parts, every)\n--\n\n"
    "Return the order of the rows of sorted parts, as int64 places among all rows one part after\n"
    "the other: by key, and the newest first; without `every` only the first row of each key.\n"
    "A part is (offsets, data, first, count, lsns, seqs). None if undecided: parts that are empty,\n"
    "not sorted, or too many.");

static PyObject *merge_places(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *list;
    int every, held = 0, state = 1;
    if (!PyArg_ParseTuple(args, "Op:merge_places", &list, &every))
        return NULL;
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "a list of parts is expected");
        return NULL;
    }
    Py_ssize_t count = PyList_Size(list);
    if (count < 1 || count > PARTS_MAX)
        return undecided();
    Part parts[PARTS_MAX];
    int64_t rows = 0, found = -1;
    for (; held < count && state == 1; held += state == 1) {
        PyObject *tuple = PyList_GetItem(list, held); /* fails if the list became shorter */
        state = tuple == NULL ? 0 : hold_part(tuple, &parts[held]);
        if (state == 1) {
            parts[held].base = rows;
            rows += parts[held].page.rows;
        }
    }
    int64_t *places = NULL;
    if (state == 1) {
        places = malloc((size_t)rows * sizeof *places);
        if (places == NULL) {
            PyErr_NoMemory();
            state = 0;
        } else if (rows < MERGED_ROWS_RELEASE) {
            found = merge_parts(parts, held, every, places);
        } else {
            Py_BEGIN_ALLOW_THREADS
            found = merge_parts(parts, held, every, places);
            Py_END_ALLOW_THREADS
        }
    }
    release_parts(parts, held);
    PyObject *result = NULL;
    if (state && found < 0)
        result = undecided();
    else if (state)
        result = PyBytes_FromStringAndSize((const char *)places, (Py_ssize_t)found * 8);
    free(places);
    return result;
}

/* A column of a part: an Arrow array of texts or bytes, or of values of one width. */
typedef struct {
    Py_buffer validity, offsets, data;
    int64_t first; /* of its buffers, which may begin with rows that are cut off */
    int is_there;
} PartColumn;

typedef struct {
    Part part;
    Py_buffer kinds;
    PartColumn *columns;
} RowPart;

/* Parts that are merged, and the rows that come out: pairs of part and row. */
typedef struct {
    RowPart *parts;
    int count, columns;
    PartColumn *room; /* of the columns of all parts */
    int32_t *pairs;
    int64_t rows, found;
} Merge;

static void release_merge(Merge *merge)
{
    for (int n = 0; n < merge->count * merge->columns; n++) {
        PartColumn *column = &merge->room[n];
        if (column->validity.obj)
            PyBuffer_Release(&column->validity);
        if (column->offsets.obj)
            PyBuffer_Release(&column->offsets);
        if (column->data.obj)
            PyBuffer_Release(&column->data);
    }
    for (int n = 0; n < merge->count; n++)
        if (merge->parts[n].kinds.obj) {
            release_parts(&merge->parts[n].part, 1);
            PyBuffer_Release(&merge->parts[n].kinds);
        }
    free(merge->pairs);
    PyMem_Free(merge->room);
    PyMem_Free(merge->parts);
}

/* An optional buffer: 1, or 0 with an error. */
static int maybe_held(PyObject *object, Py_buffer *view)
{
    return object == Py_None || PyObject_GetBuffer(object, view, PyBUF_SIMPLE) == 0;
}

/* Hold a column of a part. 1: held, 0: an error, -1: of another shape. */
static int hold_column(PyObject *tuple, int64_t width, int64_t count, PartColumn *column)
{
    PyObject *validity, *offsets, *data;
    long long first;
    if (tuple == Py_None)
        return 1;
    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "a column is a tuple");
        return 0;
    }
    if (!PyArg_ParseTuple(tuple, "OOOL:merge_rows", &validity, &offsets, &data, &first) ||
        !maybe_held(validity, &column->validity) || !maybe_held(offsets, &column->offsets) ||
        PyObject_GetBuffer(data, &column->data, PyBUF_SIMPLE) < 0)
        return 0;
    if (first < 0 || first >= OFFSET_MAX || width < 0 || width > OFFSET_MAX)
        return -1;
    int64_t last = first + count;
    if (column->validity.obj && column->validity.len < (last + 7) / 8)
        return -1;
    if (width ? column->data.len / width < last
              : (!column->offsets.obj || column->offsets.len / 4 < last + 1))
        return -1;
    column->first = first;
    column->is_there = 1;
    return 1;
}

/* Hold a part of a merge, at its first row that is not below `start`. 1, 0 or -1 as above. */
static int hold_rows(PyObject *tuple, const int64_t *widths, int columns, RowPart *rows)
{
    PyObject *keys = NULL, *of_columns = NULL;
    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "a part is a tuple");
        return 0;
    }
    if (!PyArg_ParseTuple(tuple, "O!y*O!:merge_rows", &PyTuple_Type, &keys, &rows->kinds,
            &PyTuple_Type, &of_columns))
        return 0;
    int state = hold_part(keys, &rows->part);
    if (state != 1) {
        PyBuffer_Release(&rows->kinds);
        rows->kinds.obj = NULL;
        return state;
    }
    int64_t count = rows->part.page.rows;
    if (rows->kinds.len != count || PyTuple_Size(of_columns) != columns)
        return -1;
    for (int n = 0; state == 1 && n < columns; n++)
        state = hold_column(PyTuple_GetItem(of_columns, n), widths[n], count, &rows->columns[n]);
    return state;
}

/* Leave out the rows below `start`, and from `end` on. 0 if the keys are damaged. */
static int narrow(Part *part, const Py_buffer *start, const Py_buffer *end)
{
    int64_t first = key_bound(&part->page, start->buf, (size_t)start->len, 0, 0);
    int64_t last = end->obj == NULL || first < 0
                       ? part->page.rows
                       : key_bound(&part->page, end->buf, (size_t)end->len, (uint32_t)first, 0);
    if (first < 0 || last < 0)
        return 0;
    part->row = (uint32_t)first;
    part->page.rows = (uint32_t)last;
    return first >= last || key_at(&part->page, part->row, &part->key, &part->size);
}

/* Find the newest row of each key, so many at most; 0 if undecided: a row changes only some
 * columns of the one below, or the rows are not in order. */
static int choose_rows(Merge *merge, int64_t limit)
{
    const uint8_t *last = NULL;
    uint32_t last_size = 0;
    for (;;) {
        RowPart *next = NULL;
        for (int n = 0; n < merge->count; n++) {
            Part *part = &merge->parts[n].part;
            if (part->row < part->page.rows &&
                (next == NULL || row_order(part, &next->part) < 0))
                next = &merge->parts[n];
        }
        if (next == NULL)
            return 1;
        Part *part = &next->part;
        if (last == NULL || key_order(last, last_size, part->key, part->size)) {
            if (merge->found == limit)
                return 1;
            if (((const uint8_t *)next->kinds.buf)[part->row] >= FIRST_PARTIAL)
                return 0;
            merge->pairs[2 * merge->found] = (int32_t)(next - merge->parts);
            merge->pairs[2 * merge->found + 1] = (int32_t)part->row;
            merge->found++;
            last = part->key;
            last_size = part->size;
        }
        if (!advance(part))
            return 0;
    }
}

/* The bytes of a value; 0 if its offsets are outside of the data. */
static inline int value_of(
    const PartColumn *column, int64_t width, int64_t row, const uint8_t **value, int64_t *size)
{
    int64_t place = column->first + row, first = place * width, last = first + width;
    if (!width) {
        first = i32_at((const uint8_t *)column->offsets.buf + 4 * place);
        last = i32_at((const uint8_t *)column->offsets.buf + 4 * place + 4);
        if (first < 0 || first > last || last > column->data.len)
            return 0;
    }
    *value = (const uint8_t *)column->data.buf + first;
    *size = last - first;
    return 1;
}

static inline int is_null(const PartColumn *column, int64_t row)
{
    if (!column->is_there)
        return 1;
    int64_t place = column->first + row;
    const uint8_t *validity = column->validity.buf;
    return column->validity.obj && !(validity[place >> 3] >> (place & 7) & 1);
}

/* The bytes of a column of the rows that come out; -1 if it is damaged or too large. */
static int64_t bytes_of_column(const Merge *merge, int number, int64_t width)
{
    int64_t total = 0, size;
    const uint8_t *value;
    if (width)
        return merge->found * width;
    for (int64_t n = 0; n < merge->found; n++) {
        int64_t row = merge->pairs[2 * n + 1];
        const PartColumn *column = &merge->parts[merge->pairs[2 * n]].columns[number];
        if (is_null(column, row))
            continue;
        if (!value_of(column, width, row, &value, &size) || (total += size) > OFFSET_MAX)
            return -1;
    }
    return total;
}

/* Write a column of the rows that come out; whether some are null. */
static int write_column(const Merge *merge, int number, int64_t width, uint8_t *validity,
    int32_t *offsets, uint8_t *data)
{
    int has_nulls = 0;
    int64_t used = 0, size;
    const uint8_t *value;
    memset(validity, 255, (size_t)(merge->found + 7) / 8);
    if (merge->found % 8)
        validity[merge->found / 8] = (uint8_t)((1 << merge->found % 8) - 1);
    for (int64_t n = 0; n < merge->found; n++) {
        int64_t row = merge->pairs[2 * n + 1];
        const PartColumn *column = &merge->parts[merge->pairs[2 * n]].columns[number];
        if (!width)
            offsets[n] = (int32_t)used;
        if (is_null(column, row)) {
            validity[n >> 3] &= (uint8_t)~(1 << (n & 7));
            has_nulls = 1;
            memset(data + used, 0, (size_t)width);
            used += width;
        } else if (value_of(column, width, row, &value, &size)) {
            memcpy(data + used, value, (size_t)size);
            used += size;
        }
    }
    if (!width)
        offsets[merge->found] = (int32_t)used;
    return has_nulls;
}

/* The keys and stamps of the rows that come out, as a tuple of bytes. */
static PyObject *merged_keys(const Merge *merge)
{
    PyObject *items[5] = {NULL}, *result = NULL;
    int64_t total = 0, used = 0;
    const uint8_t *key = NULL;
    uint32_t size = 0;
    for (int64_t n = 0; n < merge->found; n++) { /* each key was checked by the merge */
        key_at(&merge->parts[merge->pairs[2 * n]].part.page, (uint32_t)merge->pairs[2 * n + 1],
            &key, &size);
        total += size;
    }
    if (total > OFFSET_MAX)
        return undecided();
    uint64_t count = (uint64_t)merge->found;
    int32_t *offsets = new_bytes(&items[0], 4 * (count + 1));
    uint8_t *data = offsets ? new_bytes(&items[1], (uint64_t)total) : NULL;
    int64_t *lsns = data ? new_bytes(&items[2], 8 * count) : NULL;
    uint32_t *seqs = lsns ? new_bytes(&items[3], 4 * count) : NULL;
    uint8_t *kinds = seqs ? new_bytes(&items[4], count) : NULL;
    if (kinds != NULL) {
        for (int64_t n = 0; n < merge->found; n++) {
            const RowPart *rows = &merge->parts[merge->pairs[2 * n]];
            uint32_t row = (uint32_t)merge->pairs[2 * n + 1];
            key_at(&rows->part.page, row, &key, &size);
            offsets[n] = (int32_t)used;
            memcpy(data + used, key, size);
            used += size;
            lsns[n] = ((const int64_t *)rows->part.lsns.buf)[row];
            seqs[n] = ((const uint32_t *)rows->part.seqs.buf)[row];
            kinds[n] = ((const uint8_t *)rows->kinds.buf)[row];
        }
        offsets[merge->found] = (int32_t)used;
        result = Py_BuildValue("[OOOOO]", items[0], items[1], items[2], items[3], items[4]);
    }
    for (int n = 0; n < 5; n++)
        Py_XDECREF(items[n]);
    return result;
}

static PyObject *merged_column(const Merge *merge, int number, int64_t width)
{
    PyObject *items[3] = {NULL}, *result = NULL;
    uint64_t count = (uint64_t)merge->found;
    int64_t total = bytes_of_column(merge, number, width);
    if (total < 0)
        return undecided();
    uint8_t *validity = new_bytes(&items[0], (count + 7) / 8);
    int32_t *offsets = validity ? new_bytes(&items[1], width ? 0 : 4 * (count + 1)) : NULL;
    uint8_t *data = offsets ? new_bytes(&items[2], (uint64_t)total) : NULL;
    if (data != NULL) {
        int has_nulls = write_column(merge, number, width, validity, offsets, data);
        result = Py_BuildValue("(OOO)", has_nulls ? items[0] : Py_None, width ? Py_None : items[1],
            items[2]);
    }
    for (int n = 0; n < 3; n++)
        Py_XDECREF(items[n]);
    return result;
}

PyDoc_STRVAR(merge_rows_doc,
    "merge_rows(parts, widths, start, end, limit)\n--\n\n"
    "Return [offsets, data, lsns, seqs, kinds, *columns] of the newest row of each key in sorted\n"
    "parts: of keys from `start` to `end` (or None), and so many keys at most.\n"
    "A part is (as for merge_places, kinds, columns); a column (validity, offsets, data, first),\n"
    "or None if it is null in all rows; `widths` (int64) has the bytes of a value of each column,\n"
    "0 for texts and bytes. Columns are returned as (validity, offsets, data), as bytes or None.\n"
    "None if undecided: patches and merges, parts that are not sorted, or too many.");

static PyObject *merge_rows(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *list, *end_object, *result = NULL;
    Py_buffer widths, start, end = {0};
    long long limit;
    if (!PyArg_ParseTuple(args, "O!y*y*OL:merge_rows", &PyList_Type, &list, &widths, &start,
            &end_object, &limit))
        return NULL;
    Merge merge = {0};
    Py_ssize_t count = PyList_Size(list);
    int state = maybe_held(end_object, &end);
    if (state && (count < 1 || count > PARTS_MAX || widths.len / 8 > COLUMNS_MAX || limit < 0))
        state = -1;
    if (state == 1) {
        merge.columns = (int)(widths.len / 8);
        merge.parts = PyMem_Calloc((size_t)count, sizeof *merge.parts);
        merge.room = PyMem_Calloc((size_t)count * (size_t)merge.columns + 1, sizeof *merge.room);
        if (merge.parts == NULL || merge.room == NULL) {
            PyErr_NoMemory();
            state = 0;
        }
    }
    for (int n = 0; state == 1 && n < count; n++) {
        PyObject *tuple = PyList_GetItem(list, n); /* fails if the list became shorter */
        RowPart *rows = &merge.parts[n];
        rows->columns = merge.room + (size_t)n * (size_t)merge.columns;
        merge.count = n + 1;
        state = tuple == NULL ? 0 : hold_rows(tuple, widths.buf, merge.columns, rows);
        if (state == 1 && !narrow(&rows->part, &start, &end))
            state = -1;
        if (state == 1)
            merge.rows += rows->part.page.rows - (rows->part.row < rows->part.page.rows
                                                     ? rows->part.row
                                                     : rows->part.page.rows);
    }
    if (state == 1) {
        int64_t most = limit < merge.rows ? limit : merge.rows;
        merge.pairs = malloc((size_t)most * 8 + 8);
        if (merge.pairs == NULL) {
            PyErr_NoMemory();
            state = 0;
        } else if (most < MERGED_ROWS_RELEASE) {
            state = choose_rows(&merge, most) ? 1 : -1;
        } else {
            Py_BEGIN_ALLOW_THREADS
            state = choose_rows(&merge, most) ? 1 : -1;
            Py_END_ALLOW_THREADS
        }
    }
    if (state == 1)
        result = merged_keys(&merge);
    for (int n = 0; result != NULL && result != Py_None && n < merge.columns; n++) {
        PyObject *column = merged_column(&merge, n, ((const int64_t *)widths.buf)[n]);
        if (column == NULL || column == Py_None || PyList_Append(result, column) < 0) {
            Py_DECREF(result);
            result = column == Py_None ? undecided() : NULL;
        }
        Py_XDECREF(column);
    }
    release_merge(&merge);
    if (end.obj)
        PyBuffer_Release(&end);
    PyBuffer_Release(&start);
    PyBuffer_Release(&widths);
    return state < 0 ? undecided() : result;
}

static PyMethodDef methods[] = {
#ifndef _WIN32
    {"file_identity", file_identity, METH_VARARGS, file_identity_doc},
    {"get_values", get_values, METH_VARARGS, get_values_doc},
    {"get_row", get_row, METH_VARARGS, get_row_doc},
    {"read_rows", read_rows, METH_VARARGS, read_rows_doc},
    {"read_ranges", read_ranges, METH_VARARGS, read_ranges_doc},
#endif
    {"bytes_at", bytes_at, METH_VARARGS, bytes_at_doc},
    {"bytes_list", bytes_list, METH_VARARGS, bytes_list_doc},
    {"decode_block", decode_block, METH_VARARGS, decode_block_doc},
    {"decode_blocks", decode_blocks, METH_VARARGS, decode_blocks_doc},
    {"find_key", find_key, METH_VARARGS, find_key_doc},
    {"join_column", join_column, METH_VARARGS, join_column_doc},
    {"join_keys", join_keys, METH_VARARGS, join_keys_doc},
    {"key_place", key_place, METH_VARARGS, key_place_doc},
    {"may_have", may_have, METH_VARARGS, may_have_doc},
    {"may_have_each", may_have_each, METH_VARARGS, may_have_each_doc},
    {"merge_rows", merge_rows, METH_VARARGS, merge_rows_doc},
    {"merge_places", merge_places, METH_VARARGS, merge_places_doc},
    {"nearest_codes", nearest_codes, METH_VARARGS, nearest_codes_doc},
    {"search", search, METH_VARARGS, search_doc},
    {NULL, NULL, 0, NULL},
};

static int start(PyObject *module)
{
    const uint16_t one = 1;
    if (*(const uint8_t *)&one != 1) {
        PyErr_SetString(PyExc_ImportError, "the kernel needs a little-endian machine");
        return -1;
    }
    init_crc();
    return PyModule_AddIntConstant(module, "VERSION", KERNEL_VERSION);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, start}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "reef._kernel", "The inner loops of reads.", 0, methods, slots, NULL,
    NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModuleDef_Init(&definition); }
