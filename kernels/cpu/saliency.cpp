// The backward of a masked activation together with the first-order effect of each removal, as
// the operator `fastbcd_cpu::saliency_backward`.
//
// Both are computed in one pass over grad and x. The sums over the batch follow its cut, which does
// not depend on the number of threads, and are added up in the order of its chunks.
#include <memory>

#include "arguments.h"

namespace fastbcd {

// Flat arrays in x's memory order; residual may be null; coef [3, C] is null for relu.
template <class scalar, class compute>
struct SaliencyBackward {
  Geometry g;
  scalar* dx;
  const scalar *grad, *x, *residual;
  const uint8_t* mask;
  const compute* coef;
  bool absolute;
  compute* sums;  // [chunks, n]
};

}  // namespace fastbcd

#define FASTBCD_LOOPS "saliency_loops.h"
#include "both_targets.h"

namespace fastbcd {

void saliency_backward(
    Tensor dx, Tensor sums, Tensor grad, Tensor x, Tensor mask, MaybeTensor coef,
    MaybeTensor residual, bool absolute, std::vector<int64_t> numbers) {
  Geometry g = geometry(numbers);
  OrderedMask bits(mask, g);
  by_dtype(grad.scalar_type(), g, [&]<class scalar, class compute>(Arguments<scalar, compute> a) {
    Cut cut(g, 64);
    auto partial = std::make_unique_for_overwrite<compute[]>(cut.chunks * g.items());
    SaliencyBackward<scalar, compute> call{
        g, a.items("dx", dx), a.items("grad", grad), a.items("x", x),
        a.items("residual", residual), bits, a.by_channel("coef", coef, 3), absolute,
        partial.get()};
    in_parallel(g, cut, [&](int64_t begin, int64_t end) {
      FASTBCD_RUN(saliency_backward, call, cut, begin, end);
    });
    sum_chunks(a.by_unit("sums", sums), partial.get(), g, cut);
  });
}

}  // namespace fastbcd

STABLE_TORCH_LIBRARY_FRAGMENT(fastbcd_cpu, m) {
  m.def("saliency_backward(Tensor(a!) dx, Tensor(b!) sums, Tensor grad, Tensor x, Tensor mask, "
        "Tensor? coef, Tensor? residual, bool absolute, int[] geometry) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastbcd_cpu, CPU, m) {
  m.impl("saliency_backward", TORCH_BOX(&fastbcd::saliency_backward));
}
