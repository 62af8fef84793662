/* Instruction sets: the implementations that there are, and which ones this processor can run. */
#include "short.h"

const struct variant variants[] = {
#if defined(__x86_64__)
    {"avx512", attend_avx512},
    {"avx2", attend_avx2},
#endif
    {"portable", attend_portable},
    {NULL, NULL},
};

int first_variant(void)
{
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 2;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") ? 0 : 1;
#else
    return 0;
#endif
}
