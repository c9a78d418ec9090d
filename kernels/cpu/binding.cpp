// The masked ReLU and the masked polynomial as operators `fastbcd_cpu::*`, on torch's stable ABI.
#include "arguments.h"

#define FASTBCD_LOOPS "loops.h"
#include "both_targets.h"

namespace fastbcd {

template <bool poly>
void forward(
    const Tensor& y, const Tensor& x, const Tensor& mask, const MaybeTensor& coef,
    const MaybeTensor& scale, const MaybeTensor& shift, const MaybeTensor& residual,
    const std::vector<int64_t>& numbers) {
  Geometry g = geometry(numbers);
  std::vector<uint8_t> scratch;
  const uint8_t* bits = ordered_mask(mask, g, scratch);
  by_dtype(x.scalar_type(), g, [&]<class scalar, class compute>(Arguments<scalar, compute> a) {
    Forward<scalar, compute> call{
        g, a.stacked("y", y), a.maybe_shared("x", x, g.x_shared),
        a.maybe_shared("residual", residual, g.residual_shared), bits,
        a.by_channel("scale", scale, 1), a.by_channel("shift", shift, 1),
        a.by_channel("coef", coef, 3)};
    Cut cut(g, 4 * torch::stable::get_num_threads());
    in_parallel(g, cut, [&](int64_t begin, int64_t end) {
      FASTBCD_RUN(template forward<poly>, call, cut, begin, end);
    });
  });
}

template <bool poly>
void backward(
    const Tensor& dx, const MaybeTensor& dresidual, const MaybeTensor& dcoef,
    const MaybeTensor& daffine, const Tensor& grad, const MaybeTensor& y, const MaybeTensor& x,
    const Tensor& mask, const MaybeTensor& coef, const MaybeTensor& scale,
    const MaybeTensor& shift, const MaybeTensor& residual, const std::vector<int64_t>& numbers) {
  Geometry g = geometry(numbers);
  std::vector<uint8_t> scratch;
  const uint8_t* bits = ordered_mask(mask, g, scratch);
  by_dtype(grad.scalar_type(), g, [&]<class scalar, class compute>(Arguments<scalar, compute> a) {
    // Sums follow the cut, so it must not depend on the number of threads.
    Cut cut(g, 64);
    int64_t rows = (poly ? 3 : 0) + (daffine ? 2 : 0);
    std::vector<compute> sums(rows * cut.chunks * g.items());
    Backward<scalar, compute> call{
        g, a.maybe_shared("dx", dx, g.x_shared),
        a.maybe_shared("dresidual", dresidual, g.residual_shared), a.stacked("grad", grad),
        a.stacked("y", y), a.maybe_shared("x", x, g.x_shared),
        a.maybe_shared("residual", residual, g.residual_shared), bits,
        a.by_channel("scale", scale, 1), a.by_channel("shift", shift, 1),
        a.by_channel("coef", coef, 3), rows ? sums.data() : nullptr};
    in_parallel(g, cut, [&](int64_t begin, int64_t end) {
      if constexpr (poly)
        FASTBCD_RUN(poly_backward, call, cut, begin, end);
      else
        FASTBCD_RUN(relu_backward, call, cut, begin, end);
    });
    compute* coefs = a.by_channel("dcoef", dcoef, 3);
    compute* affine = a.by_channel("daffine", daffine, 2);
    torch::stable::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        int64_t affine_row = row - (poly ? 3 : 0);
        compute* out = affine_row < 0 ? coefs + row * g.channels : affine + affine_row * g.channels;
        sum_channels(out, sums.data(), g, cut, row);
      }
    });
  });
}

void relu_forward(
    Tensor y, Tensor x, Tensor mask, MaybeTensor scale, MaybeTensor shift, MaybeTensor residual,
    std::vector<int64_t> g) {
  forward<false>(y, x, mask, std::nullopt, scale, shift, residual, g);
}

void relu_backward(
    Tensor dx, MaybeTensor dresidual, MaybeTensor daffine, Tensor grad, Tensor y, Tensor mask,
    MaybeTensor x, MaybeTensor scale, std::vector<int64_t> g) {
  backward<false>(dx, dresidual, std::nullopt, daffine, grad, y, x, mask, std::nullopt, scale,
                  std::nullopt, std::nullopt, g);
}

void poly_forward(
    Tensor y, Tensor x, Tensor mask, Tensor coef, MaybeTensor scale, MaybeTensor shift,
    MaybeTensor residual, std::vector<int64_t> g) {
  forward<true>(y, x, mask, coef, scale, shift, residual, g);
}

void poly_backward(
    Tensor dx, MaybeTensor dresidual, Tensor dcoef, MaybeTensor daffine, Tensor grad, Tensor x,
    Tensor mask, Tensor coef, MaybeTensor scale, MaybeTensor shift, MaybeTensor residual,
    std::vector<int64_t> g) {
  backward<true>(dx, dresidual, dcoef, daffine, grad, std::nullopt, x, mask, coef, scale, shift,
                 residual, g);
}

std::string instruction_set() { return has_avx2 ? "avx2" : "baseline instruction set"; }

}  // namespace fastbcd

STABLE_TORCH_LIBRARY(fastbcd_cpu, m) {
  m.def("relu_forward(Tensor(a!) y, Tensor x, Tensor mask, Tensor? scale, Tensor? shift, "
        "Tensor? residual, int[] geometry) -> ()");
  m.def("relu_backward(Tensor(a!) dx, Tensor(b!)? dresidual, Tensor(c!)? daffine, Tensor grad, "
        "Tensor y, Tensor mask, Tensor? x, Tensor? scale, int[] geometry) -> ()");
  m.def("poly_forward(Tensor(a!) y, Tensor x, Tensor mask, Tensor coef, Tensor? scale, "
        "Tensor? shift, Tensor? residual, int[] geometry) -> ()");
  m.def("poly_backward(Tensor(a!) dx, Tensor(b!)? dresidual, Tensor(c!) dcoef, "
        "Tensor(d!)? daffine, Tensor grad, Tensor x, Tensor mask, Tensor coef, Tensor? scale, "
        "Tensor? shift, Tensor? residual, int[] geometry) -> ()");
  m.def("instruction_set() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(fastbcd_cpu, CPU, m) {
  m.impl("relu_forward", TORCH_BOX(&fastbcd::relu_forward));
  m.impl("relu_backward", TORCH_BOX(&fastbcd::relu_backward));
  m.impl("poly_forward", TORCH_BOX(&fastbcd::poly_forward));
  m.impl("poly_backward", TORCH_BOX(&fastbcd::poly_backward));
}

STABLE_TORCH_LIBRARY_IMPL(fastbcd_cpu, CompositeExplicitAutograd, m) {
  m.impl("instruction_set", TORCH_BOX(&fastbcd::instruction_set));
}
