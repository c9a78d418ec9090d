// soft_relu and the backward of indicator_poly as operators `fastbcd_cpu::*`: the activations that
// SNL and AutoReP train. The forward of indicator_poly is that of masked_poly.
//
// Sums over the batch follow its cut, which does not depend on the number of threads, and are added
// up in the order of its chunks.
#include <memory>

#include "arguments.h"

namespace fastbcd {

// Flat arrays in x's memory order; the residual may be null.
template <class scalar, class compute>
struct SoftReluForward {
  Geometry g;
  scalar* y;
  const scalar *x, *residual;
  const compute* alpha;  // [n]
};

template <class scalar, class compute>
struct SoftReluBackward {
  Geometry g;
  scalar* dx;
  const scalar *grad, *x, *residual;
  const compute* alpha;
  compute* sums;  // [chunks, n]
};

template <class scalar, class compute>
struct IndicatorPolyBackward {
  Geometry g;
  scalar* dx;
  const scalar *grad, *x, *residual;
  const uint8_t* mask;
  const compute* coef;  // [3, C]
  compute* sums;  // [4, chunks, n]: dc0, dc1, dc2, dm
};

}  // namespace fastbcd

#define FASTBCD_LOOPS "soft_loops.h"
#include "both_targets.h"

namespace fastbcd {

void soft_relu_forward(
    Tensor y, Tensor x, Tensor alpha, MaybeTensor residual, std::vector<int64_t> numbers) {
  Geometry g = geometry(numbers);
  by_dtype(x.scalar_type(), g, [&]<class scalar, class compute>(Arguments<scalar, compute> a) {
    SoftReluForward<scalar, compute> call{
        g, a.items("y", y), a.items("x", x), a.items("residual", residual),
        a.by_unit("alpha", alpha)};
    Cut cut(g, 4 * torch::stable::get_num_threads());
    in_parallel(g, cut, [&](int64_t begin, int64_t end) {
      FASTBCD_RUN(soft_relu_forward, call, cut, begin, end);
    });
  });
}

void soft_relu_backward(
    Tensor dx, Tensor dalpha, Tensor grad, Tensor x, Tensor alpha, MaybeTensor residual,
    std::vector<int64_t> numbers) {
  Geometry g = geometry(numbers);
  by_dtype(grad.scalar_type(), g, [&]<class scalar, class compute>(Arguments<scalar, compute> a) {
    Cut cut(g, 64);
    auto sums = std::make_unique_for_overwrite<compute[]>(cut.chunks * g.items());
    SoftReluBackward<scalar, compute> call{
        g, a.items("dx", dx), a.items("grad", grad), a.items("x", x),
        a.items("residual", residual),
        a.by_unit("alpha", alpha), sums.get()};
    in_parallel(g, cut, [&](int64_t begin, int64_t end) {
      FASTBCD_RUN(soft_relu_backward, call, cut, begin, end);
    });
    sum_chunks(a.by_unit("dalpha", dalpha), sums.get(), g, cut);
  });
}

void indicator_poly_backward(
    Tensor dx, Tensor dcoef, Tensor dmask, Tensor grad, Tensor x, Tensor mask, Tensor coef,
    MaybeTensor residual, std::vector<int64_t> numbers) {
  Geometry g = geometry(numbers);
  OrderedMask bits(mask, g);
  by_dtype(grad.scalar_type(), g, [&]<class scalar, class compute>(Arguments<scalar, compute> a) {
    Cut cut(g, 64);
    int64_t row = cut.chunks * g.items();
    auto sums = std::make_unique_for_overwrite<compute[]>(4 * row);
    IndicatorPolyBackward<scalar, compute> call{
        g, a.items("dx", dx), a.items("grad", grad), a.items("x", x),
        a.items("residual", residual), bits, a.by_channel("coef", coef, 3), sums.get()};
    in_parallel(g, cut, [&](int64_t begin, int64_t end) {
      FASTBCD_RUN(indicator_poly_backward, call, cut, begin, end);
    });
    compute* coefs = a.by_channel("dcoef", dcoef, 3);
    torch::stable::parallel_for(0, 3, 1, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k)
        sum_channels(coefs + k * g.channels, sums.get(), g, cut, k);
    });
    sum_chunks(a.by_unit("dmask", dmask), sums.get() + 3 * row, g, cut);
  });
}

}  // namespace fastbcd

STABLE_TORCH_LIBRARY_FRAGMENT(fastbcd_cpu, m) {
  m.def("soft_relu_forward(Tensor(a!) y, Tensor x, Tensor alpha, Tensor? residual, int[] geometry) "
        "-> ()");
  m.def("soft_relu_backward(Tensor(a!) dx, Tensor(b!) dalpha, Tensor grad, Tensor x, Tensor alpha, "
        "Tensor? residual, int[] geometry) -> ()");
  m.def("indicator_poly_backward(Tensor(a!) dx, Tensor(b!) dcoef, Tensor(c!) dmask, Tensor grad, "
        "Tensor x, Tensor mask, Tensor coef, Tensor? residual, int[] geometry) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastbcd_cpu, CPU, m) {
  m.impl("soft_relu_forward", TORCH_BOX(&fastbcd::soft_relu_forward));
  m.impl("soft_relu_backward", TORCH_BOX(&fastbcd::soft_relu_backward));
  m.impl("indicator_poly_backward", TORCH_BOX(&fastbcd::indicator_poly_backward));
}
