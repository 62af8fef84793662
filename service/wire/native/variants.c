/* Instruction sets: which ones this processor has, and which one is in use. */
#include "numbers.h"

const char *const VARIANT_NAMES[VARIANTS] = {"avx512", "avx2", "portable"};
int variant = PORTABLE;

int can_run(int which)
{
#ifdef X86
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi");
    if (which == AVX2) return avx2;
    if (which == AVX512)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512bw");
#endif
    return which == PORTABLE;
}

void prepare_numbers(void)
{
    prepare_powers();
    prepare_writing();
#ifdef X86
    prepare_reading();
#endif
}
