/* Vectors of LANES floats, and what is computed with them. See kernel.h for LANES and TARGET. */
#ifndef ATTEND_VECTORS_H
#define ATTEND_VECTORS_H

#include <math.h>
#include <string.h>

#define INLINE TARGET static inline __attribute__((always_inline))

typedef float vector __attribute__((vector_size(4 * LANES)));
typedef int int_vector __attribute__((vector_size(4 * LANES)));
typedef unsigned bits_vector __attribute__((vector_size(4 * LANES)));

INLINE vector load(const float *from) { vector x; memcpy(&x, from, sizeof x); return x; }
INLINE void store(float *to, vector x) { memcpy(to, &x, sizeof x); }
INLINE vector choose(int_vector where, vector yes, vector no) { return (vector)(((int_vector)yes & where) | ((int_vector)no & ~where)); }

/* e^x for x <= 0, and NaN for NaN, to about one unit in the last place: 2^n e^r with |r| <= ln(2) / 2; the polynomial is that of Cephes' expf. */
INLINE vector exponential(vector x)
{
    const float round = 12582912.0f; /* 1.5 · 2^23: a sum with it is rounded to a whole number, which stands in its lowest bits */
    const vector shifted = x * 1.44269504f + round, n = shifted - round;
    const vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    const vector p = ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r + 1.6666665459e-1f) * r + 0.5f;
    const vector power = (vector)(((bits_vector)shifted - 0x4b400000 + 127) << 23); /* 2^n */
    return choose(x < -87.0f, (vector){0}, (p * r * r + r + 1.0f) * power);
}

/* The sum of a vector's numbers, and the largest of them, by halves. */
INLINE float sum_of(vector x)
{
    float part[LANES];
    store(part, x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[half + i];
    return part[0];
}

INLINE float largest_of(vector x)
{
    float part[LANES];
    store(part, x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] = part[half + i] > part[i] ? part[half + i] : part[i];
    return part[0];
}

/* The sums of the pairs of neighbours in a and b. */
INLINE vector pair_sums(vector a, vector b)
{
#ifdef __clang__ /* has no __builtin_shuffle */
    float pairs[2 * LANES], sums[LANES];
    store(pairs, a), store(pairs + LANES, b);
    for (int i = 0; i < LANES; i++) sums[i] = pairs[2 * i] + pairs[2 * i + 1];
    return load(sums);
#else
    static const int evens[16] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    int_vector even;
    memcpy(&even, evens, sizeof even);
    return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, even + 1);
#endif
}

/* A vector of the sums of LANES vectors, which are overwritten. */
INLINE vector sums_of(vector *x)
{
    for (int n = LANES / 2; n; n /= 2)
        for (int i = 0; i < n; i++) x[i] = pair_sums(x[2 * i], x[2 * i + 1]);
    return x[0];
}

#endif
