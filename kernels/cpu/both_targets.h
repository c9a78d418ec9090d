// The loops of the file FASTBCD_LOOPS, for any machine and for AVX2, chosen at run time by
// FASTBCD_RUN. Memory, not arithmetic, is the limit, so wider vectors bring nothing.
//
//   #define FASTBCD_LOOPS "loops.h"
//   #include "both_targets.h"
//
// Once in a .cpp, after arguments.h: no header may be read first under the target pragma.
namespace fastbcd::baseline {
#include FASTBCD_LOOPS
}
#ifdef FASTBCD_X86
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
namespace fastbcd::avx2 {
#include FASTBCD_LOOPS
}
#pragma GCC pop_options
#endif
