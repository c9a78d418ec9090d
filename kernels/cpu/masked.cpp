// masked_relu and masked_poly as operators `fastbcd_cpu::*`, on torch's stable ABI.
#include "masked.h"

#define FASTBCD_LOOPS "masked_loops.h"
#include "both_targets.h"

namespace fastbcd {

template <bool poly, class scalar, class compute>
void run_forward(const MaskedForward<scalar, compute>& call) {
  const Geometry& g = call.g;
  // In the order of memory: whole pixels, or one channel of an item, unless that is too short.
  constexpr int64_t least_row = 16;
  if (g.trials == 1 && (g.channels_last ? g.channels <= Cut::tile : g.inner >= least_row)) {
    int64_t pixels = std::max<int64_t>(1, Cut::tile / 2 / g.channels);
    int64_t width = g.channels_last ? g.channels * pixels : g.inner;
    int64_t pieces = g.batch * ((g.items() + width - 1) / width);
    int64_t grain = (least_elements + width - 1) / width;
    torch::stable::parallel_for(0, pieces, grain, [&](int64_t begin, int64_t end) {
      FASTBCD_RUN(template forward_in_order<poly>, call, width, begin, end);
    });
    return;
  }
  Cut cut(g, 4 * torch::stable::get_num_threads());
  in_parallel(g, cut, [&](int64_t begin, int64_t end) {
    FASTBCD_RUN(template forward<poly>, call, cut, begin, end);
  });
}

void run_masked_relu(const MaskedForward<float, float>& call) { run_forward<false>(call); }

// dcoef [3, C] and daffine [2, C] are written where they are not null.
template <bool poly, class scalar, class compute>
void run_backward(MaskedBackward<scalar, compute> call, compute* dcoef, compute* daffine) {
  const Geometry& g = call.g;
  // Sums follow the cut, so it must not depend on the number of threads.
  Cut cut(g, 64);
  int64_t coefs = dcoef ? 3 : 0, rows = coefs + (daffine ? 2 : 0);
  std::vector<compute> sums(rows * cut.chunks * g.items());
  if (rows) call.sums = sums.data();
  in_parallel(g, cut, [&](int64_t begin, int64_t end) {
    FASTBCD_RUN(template backward<poly>, call, cut, begin, end);
  });
  torch::stable::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      compute* out = row < coefs ? dcoef + row * g.channels : daffine + (row - coefs) * g.channels;
      sum_channels(out, sums.data(), g, cut, row);
    }
  });
}

void masked_relu_forward(
    Tensor y, Tensor x, Tensor mask, MaybeTensor scale, MaybeTensor shift, MaybeTensor residual,
    std::vector<int64_t> numbers) {
  Geometry g = geometry(numbers);
  OrderedMask bits(mask, g);
  by_dtype(x.scalar_type(), g, [&]<class scalar, class compute>(Arguments<scalar, compute> a) {
    run_forward<false>(MaskedForward<scalar, compute>{
        .g = g, .y = a.items("y", y), .x = a.items("x", x, g.x_shared),
        .residual = a.items("residual", residual, g.residual_shared), .mask = bits,
        .scale = a.by_channel("scale", scale, 1), .shift = a.by_channel("shift", shift, 1)});
  });
}

void masked_relu_backward(
    Tensor dx, MaybeTensor dresidual, MaybeTensor daffine, Tensor grad, Tensor y, Tensor mask,
    MaybeTensor x, MaybeTensor scale, std::vector<int64_t> numbers) {
  Geometry g = geometry(numbers);
  OrderedMask bits(mask, g);
  STD_TORCH_CHECK(!daffine || (x && scale), "daffine needs x and scale");
  by_dtype(grad.scalar_type(), g, [&]<class scalar, class compute>(Arguments<scalar, compute> a) {
    MaskedBackward<scalar, compute> call{
        .g = g, .dx = a.items("dx", dx, g.x_shared),
        .dresidual = a.items("dresidual", dresidual, g.residual_shared),
        .grad = a.items("grad", grad), .y = a.items("y", y), .x = a.items("x", x, g.x_shared),
        .mask = bits, .scale = a.by_channel("scale", scale, 1)};
    run_backward<false, scalar, compute>(call, nullptr, a.by_channel("daffine", daffine, 2));
  });
}

void masked_poly_forward(
    Tensor y, Tensor x, Tensor mask, Tensor coef, MaybeTensor scale, MaybeTensor shift,
    MaybeTensor residual, std::vector<int64_t> numbers) {
  Geometry g = geometry(numbers);
  OrderedMask bits(mask, g);
  by_dtype(x.scalar_type(), g, [&]<class scalar, class compute>(Arguments<scalar, compute> a) {
    run_forward<true>(MaskedForward<scalar, compute>{
        .g = g, .y = a.items("y", y), .x = a.items("x", x, g.x_shared),
        .residual = a.items("residual", residual, g.residual_shared), .mask = bits,
        .scale = a.by_channel("scale", scale, 1), .shift = a.by_channel("shift", shift, 1),
        .coef = a.by_channel("coef", coef, 3)});
  });
}

// y, or nothing where fastbcd/ops must check or copy an argument first.
MaybeTensor masked_relu_plain(
    Tensor x, Tensor mask, MaybeTensor scale, MaybeTensor shift, MaybeTensor residual) {
  PlainCall call(x, mask);
  if (scale.has_value() != shift.has_value() || !call.fits() || !call.fits_small(scale) ||
      !call.fits_small(shift) || !call.fits_items(residual))
    return std::nullopt;
  Tensor y = torch::stable::empty_like(x);
  masked_relu_forward(y, x, mask, scale, shift, residual, call.numbers());
  return y;
}

// dx of a call without scale, or nothing, as above.
MaybeTensor masked_relu_backward_plain(Tensor grad, Tensor y, Tensor mask) {
  PlainCall call(y, mask);
  if (!call.fits() || !call.fits_items(grad)) return std::nullopt;
  Tensor dx = torch::stable::empty_like(grad);
  masked_relu_backward(
      dx, std::nullopt, std::nullopt, grad, y, mask, std::nullopt, std::nullopt, call.numbers());
  return dx;
}

MaybeTensor masked_poly_plain(
    Tensor x, Tensor mask, Tensor coef, MaybeTensor scale, MaybeTensor shift,
    MaybeTensor residual) {
  PlainCall call(x, mask);
  if (scale.has_value() != shift.has_value() || !call.fits() || !call.fits_small(coef, 3) ||
      !call.fits_small(scale) || !call.fits_small(shift) || !call.fits_items(residual))
    return std::nullopt;
  Tensor y = torch::stable::empty_like(x);
  masked_poly_forward(y, x, mask, coef, scale, shift, residual, call.numbers());
  return y;
}

void masked_poly_backward(
    Tensor dx, MaybeTensor dresidual, Tensor dcoef, MaybeTensor daffine, Tensor grad, Tensor x,
    Tensor mask, Tensor coef, MaybeTensor scale, MaybeTensor shift, MaybeTensor residual,
    std::vector<int64_t> numbers) {
  Geometry g = geometry(numbers);
  OrderedMask bits(mask, g);
  STD_TORCH_CHECK(daffine.has_value() == scale.has_value(), "daffine and scale go together");
  by_dtype(grad.scalar_type(), g, [&]<class scalar, class compute>(Arguments<scalar, compute> a) {
    MaskedBackward<scalar, compute> call{
        .g = g, .dx = a.items("dx", dx, g.x_shared),
        .dresidual = a.items("dresidual", dresidual, g.residual_shared),
        .grad = a.items("grad", grad), .x = a.items("x", x, g.x_shared),
        .residual = a.items("residual", residual, g.residual_shared), .mask = bits,
        .scale = a.by_channel("scale", scale, 1), .shift = a.by_channel("shift", shift, 1),
        .coef = a.by_channel("coef", coef, 3)};
    run_backward<true, scalar, compute>(
        call, a.by_channel("dcoef", dcoef, 3), a.by_channel("daffine", daffine, 2));
  });
}

std::string instruction_set() { return has_avx2 ? "avx2" : "baseline instruction set"; }

}  // namespace fastbcd

STABLE_TORCH_LIBRARY(fastbcd_cpu, m) {
  m.def("masked_relu_forward(Tensor(a!) y, Tensor x, Tensor mask, Tensor? scale, Tensor? shift, "
        "Tensor? residual, int[] geometry) -> ()");
  m.def("masked_relu_backward(Tensor(a!) dx, Tensor(b!)? dresidual, Tensor(c!)? daffine, "
        "Tensor grad, Tensor y, Tensor mask, Tensor? x, Tensor? scale, int[] geometry) -> ()");
  m.def("masked_poly_forward(Tensor(a!) y, Tensor x, Tensor mask, Tensor coef, Tensor? scale, "
        "Tensor? shift, Tensor? residual, int[] geometry) -> ()");
  m.def("masked_poly_backward(Tensor(a!) dx, Tensor(b!)? dresidual, Tensor(c!) dcoef, "
        "Tensor(d!)? daffine, Tensor grad, Tensor x, Tensor mask, Tensor coef, Tensor? scale, "
        "Tensor? shift, Tensor? residual, int[] geometry) -> ()");
  m.def("masked_relu_plain(Tensor x, Tensor mask, Tensor? scale, Tensor? shift, Tensor? residual) "
        "-> Tensor?");
  m.def("masked_relu_backward_plain(Tensor grad, Tensor y, Tensor mask) -> Tensor?");
  m.def("masked_poly_plain(Tensor x, Tensor mask, Tensor coef, Tensor? scale, Tensor? shift, "
        "Tensor? residual) -> Tensor?");
  m.def("instruction_set() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(fastbcd_cpu, CPU, m) {
  m.impl("masked_relu_forward", TORCH_BOX(&fastbcd::masked_relu_forward));
  m.impl("masked_relu_backward", TORCH_BOX(&fastbcd::masked_relu_backward));
  m.impl("masked_poly_forward", TORCH_BOX(&fastbcd::masked_poly_forward));
  m.impl("masked_poly_backward", TORCH_BOX(&fastbcd::masked_poly_backward));
}

STABLE_TORCH_LIBRARY_IMPL(fastbcd_cpu, CompositeExplicitAutograd, m) {
  m.impl("instruction_set", TORCH_BOX(&fastbcd::instruction_set));
  m.impl("masked_relu_plain", TORCH_BOX(&fastbcd::masked_relu_plain));
  m.impl("masked_relu_backward_plain", TORCH_BOX(&fastbcd::masked_relu_backward_plain));
  m.impl("masked_poly_plain", TORCH_BOX(&fastbcd::masked_poly_plain));
}
