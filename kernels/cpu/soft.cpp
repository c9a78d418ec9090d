// The activations that SNL and AutoReP train, as operators `fastbcd_cpu::*`: the soft ReLU, whose
// mask is a real number a unit, and the backward of the masked polynomial under an indicator.
//
// Both sum over the batch for each unit on the way. The sums follow the cut of the batch, which
// does not depend on the number of threads, and are added up in the order of its chunks.
#include <memory>

#include "arguments.h"

namespace fastbcd {

// Flat arrays in x's memory order; the residual may be null.
template <class scalar, class compute>
struct SoftForward {
  Geometry g;
  scalar* y;
  const scalar *x, *residual;
  const compute* alpha;  // [n]
};

template <class scalar, class compute>
struct SoftBackward {
  Geometry g;
  scalar* dx;
  const scalar *grad, *x, *residual;
  const compute* alpha;
  compute* sums;  // [chunks, n]
};

template <class scalar, class compute>
struct IndicatorBackward {
  Geometry g;
  scalar* dx;
  const scalar *grad, *x, *residual;
  const uint8_t* mask;
  const compute *scale, *shift, *coef;  // no affine: scale and shift are null
  compute* sums;  // [4, chunks, n]: dc0, dc1, dc2, dm
};

}  // namespace fastbcd

#define FASTBCD_LOOPS "soft_loops.h"
#include "both_targets.h"

namespace fastbcd {

void soft_forward(
    Tensor y, Tensor x, Tensor alpha, MaybeTensor residual, std::vector<int64_t> numbers) {
  Geometry g = geometry(numbers);
  by_dtype(x.scalar_type(), g, [&]<class scalar, class compute>(Arguments<scalar, compute> a) {
    SoftForward<scalar, compute> call{
        g, a.stacked("y", y), a.stacked("x", x), a.stacked("residual", residual),
        pointer<compute>("alpha", alpha, g.items(), a.compute_type)};
    Cut cut(g, 4 * torch::stable::get_num_threads());
    in_parallel(g, cut, [&](int64_t begin, int64_t end) {
      FASTBCD_RUN(soft_forward, call, cut, begin, end);
    });
  });
}

void soft_backward(
    Tensor dx, Tensor dalpha, Tensor grad, Tensor x, Tensor alpha, MaybeTensor residual,
    std::vector<int64_t> numbers) {
  Geometry g = geometry(numbers);
  by_dtype(grad.scalar_type(), g, [&]<class scalar, class compute>(Arguments<scalar, compute> a) {
    Cut cut(g, 64);
    auto sums = std::make_unique_for_overwrite<compute[]>(cut.chunks * g.items());
    SoftBackward<scalar, compute> call{
        g, a.stacked("dx", dx), a.stacked("grad", grad), a.stacked("x", x),
        a.stacked("residual", residual),
        pointer<compute>("alpha", alpha, g.items(), a.compute_type), sums.get()};
    in_parallel(g, cut, [&](int64_t begin, int64_t end) {
      FASTBCD_RUN(soft_backward, call, cut, begin, end);
    });
    sum_chunks(
        pointer<compute>("dalpha", dalpha, g.items(), a.compute_type), sums.get(), g, cut);
  });
}

void indicator_backward(
    Tensor dx, Tensor dcoef, Tensor dmask, Tensor grad, Tensor x, Tensor mask, Tensor coef,
    MaybeTensor residual, std::vector<int64_t> numbers) {
  Geometry g = geometry(numbers);
  std::vector<uint8_t> scratch;
  const uint8_t* bits = ordered_mask(mask, g, scratch);
  by_dtype(grad.scalar_type(), g, [&]<class scalar, class compute>(Arguments<scalar, compute> a) {
    Cut cut(g, 64);
    int64_t row = cut.chunks * g.items();
    auto sums = std::make_unique_for_overwrite<compute[]>(4 * row);
    IndicatorBackward<scalar, compute> call{
        g, a.stacked("dx", dx), a.stacked("grad", grad), a.stacked("x", x),
        a.stacked("residual", residual), bits, nullptr, nullptr, a.by_channel("coef", coef, 3),
        sums.get()};
    in_parallel(g, cut, [&](int64_t begin, int64_t end) {
      FASTBCD_RUN(indicator_backward, call, cut, begin, end);
    });
    compute* coefs = a.by_channel("dcoef", dcoef, 3);
    torch::stable::parallel_for(0, 3, 1, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k)
        sum_channels(coefs + k * g.channels, sums.get(), g, cut, k);
    });
    sum_chunks(
        pointer<compute>("dmask", dmask, g.items(), a.compute_type), sums.get() + 3 * row, g, cut);
  });
}

}  // namespace fastbcd

STABLE_TORCH_LIBRARY_FRAGMENT(fastbcd_cpu, m) {
  m.def("soft_forward(Tensor(a!) y, Tensor x, Tensor alpha, Tensor? residual, int[] geometry) "
        "-> ()");
  m.def("soft_backward(Tensor(a!) dx, Tensor(b!) dalpha, Tensor grad, Tensor x, Tensor alpha, "
        "Tensor? residual, int[] geometry) -> ()");
  m.def("indicator_backward(Tensor(a!) dx, Tensor(b!) dcoef, Tensor(c!) dmask, Tensor grad, "
        "Tensor x, Tensor mask, Tensor coef, Tensor? residual, int[] geometry) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastbcd_cpu, CPU, m) {
  m.impl("soft_forward", TORCH_BOX(&fastbcd::soft_forward));
  m.impl("soft_backward", TORCH_BOX(&fastbcd::soft_backward));
  m.impl("indicator_backward", TORCH_BOX(&fastbcd::indicator_backward));
}
