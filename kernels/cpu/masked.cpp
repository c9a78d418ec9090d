// The masked activations as operators `fastbcd_cpu::*`, on torch's stable ABI.
//
// Sums over the batch follow its cut, which does not depend on the number of threads, and are added
// up in the order of its chunks.
#include "masked.h"

#define FASTBCD_LOOPS "masked_loops.h"
#include "both_targets.h"

namespace fastbcd {

template <class scalar, class compute>
void forward_call(const Masked<scalar, compute>& call) {
  const Geometry& g = call.g;
  // In the order of memory: whole pixels, or one channel of an item, unless that is too short.
  constexpr int64_t least_row = 16;
  bool long_enough = g.channels_last ? g.channels <= Cut::tile : g.inner >= least_row;
  if (g.trials == 1 && call.bits && long_enough) {
    int64_t pixels = std::max<int64_t>(1, Cut::tile / 2 / g.channels);
    int64_t width = g.channels_last ? g.channels * pixels : g.inner;
    int64_t pieces = g.batch * ((g.items() + width - 1) / width);
    int64_t grain = (least_elements + width - 1) / width;
    torch::stable::parallel_for(0, pieces, grain, [&](int64_t begin, int64_t end) {
      FASTBCD_RUN(forward_in_order, call, width, begin, end);
    });
    return;
  }
  Cut cut(g, 4 * torch::stable::get_num_threads());
  in_parallel(g, cut, [&](int64_t begin, int64_t end) {
    FASTBCD_RUN(forward, call, cut, begin, end);
  });
}

void run_forward(const Masked<float, float>& call) { forward_call(call); }

// dsmall [rows, C] and dunits [n] are written where they are not null.
template <class scalar, class compute>
void backward_call(Masked<scalar, compute> call, compute* dsmall, compute* dunits) {
  const Geometry& g = call.g;
  Cut cut(g, 64);  // must not depend on the number of threads
  int small = 0, rows = 0;
  if (dsmall) {
    for (int k = 0; call.coef && k <= call.degree; ++k) call.rows[k] = small++;
    if (call.scale) call.rows[3] = small++, call.rows[4] = small++;
  }
  rows = small;
  if (dunits) call.rows[5] = rows++;
  auto sums = std::make_unique_for_overwrite<compute[]>(rows * cut.chunks * g.items());
  call.sums = sums.get();
  in_parallel(g, cut, [&](int64_t begin, int64_t end) {
    FASTBCD_RUN(backward, call, cut, begin, end);
  });
  torch::stable::parallel_for(0, small, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      sum_channels(dsmall + row * g.channels, sums.get(), g, cut, row);
  });
  if (dunits) sum_chunks(dunits, sums.get() + small * cut.chunks * g.items(), g, cut);
}

// What forward and backward have in common; bits: the mask in x's memory order.
template <class scalar, class compute>
Masked<scalar, compute> common_call(
    const Arguments<scalar, compute>& a, const MaybeTensor& x, const Tensor& mask,
    const OrderedMask& bits, const MaybeTensor& coef, const MaybeTensor& scale,
    const MaybeTensor& shift, const MaybeTensor& residual) {
  Masked<scalar, compute> call{
      .g = a.g, .x = a.items("x", x, a.g.x_shared),
      .residual = a.items("residual", residual, a.g.residual_shared), .bits = bits,
      .scale = a.by_channel("scale", scale, 1), .shift = a.by_channel("shift", shift, 1)};
  if (!call.bits) {
    STD_TORCH_CHECK(!scale && a.g.trials == 1, "numbers for bits: no scale, no trials");
    call.alpha = a.by_unit("mask", mask);
  }
  if (coef) {
    call.degree = static_cast<int>(coef->numel() / a.g.channels) - 1;
    STD_TORCH_CHECK(call.degree == 1 || call.degree == 2, "coef has the wrong number of elements");
    call.coef = a.by_channel("coef", coef, call.degree + 1);
  }
  return call;
}

void masked_forward(
    Tensor y, Tensor x, Tensor mask, MaybeTensor coef, MaybeTensor scale, MaybeTensor shift,
    MaybeTensor residual, std::vector<int64_t> numbers) {
  Geometry g = geometry(numbers);
  OrderedMask bits(mask, g);
  by_dtype(x.scalar_type(), g, [&]<class scalar, class compute>(Arguments<scalar, compute> a) {
    auto call = common_call(a, x, mask, bits, coef, scale, shift, residual);
    call.y = a.items("y", y);
    forward_call(call);
  });
}

void masked_backward(
    Tensor dx, MaybeTensor dresidual, MaybeTensor dsmall, MaybeTensor dunits, Tensor grad,
    MaybeTensor y, MaybeTensor x, Tensor mask, MaybeTensor coef, MaybeTensor scale,
    MaybeTensor shift, MaybeTensor residual, bool absolute, std::vector<int64_t> numbers) {
  Geometry g = geometry(numbers);
  OrderedMask bits(mask, g);
  STD_TORCH_CHECK(y ? bits && !coef && !dunits : x && (!bits || coef || dunits),
                  "y is for the identity with bits alone, x for everything else");
  STD_TORCH_CHECK(!dsmall || !scale || x, "the gradient of scale needs x");
  STD_TORCH_CHECK(!(dunits && (scale || g.trials > 1)), "dunits: no scale, no trials");
  by_dtype(grad.scalar_type(), g, [&]<class scalar, class compute>(Arguments<scalar, compute> a) {
    auto call = common_call(a, x, mask, bits, coef, scale, shift, residual);
    call.y = a.items("y", y);
    call.grad = a.items("grad", grad);
    call.dx = a.items("dx", dx, g.x_shared);
    call.dresidual = a.items("dresidual", dresidual, g.residual_shared);
    call.absolute = absolute;
    int64_t rows = (coef ? call.degree + 1 : 0) + (scale ? 2 : 0);
    backward_call(call, a.by_channel("dsmall", dsmall, rows), a.by_unit("dunits", dunits));
  });
}

// y, or nothing where fastbcd/ops must check or copy an argument first.
MaybeTensor masked_plain(
    Tensor x, Tensor mask, MaybeTensor coef, MaybeTensor scale, MaybeTensor shift,
    MaybeTensor residual) {
  PlainCall call(x, mask);
  if ((scale && mask.scalar_type() == call.compute_type) || scale.has_value() != shift.has_value() || !call.fits() || !call.fits_coef(coef) ||
      !call.fits_small(scale) || !call.fits_small(shift) || !call.fits_items(residual))
    return std::nullopt;
  Tensor y = torch::stable::empty_like(x);
  masked_forward(y, x, mask, coef, scale, shift, residual, call.numbers());
  return y;
}

// dx, dresidual, dsmall and, of numbers in place of the bits, dunits; or nothing, as above.
std::tuple<MaybeTensor, MaybeTensor, MaybeTensor, MaybeTensor> masked_backward_plain(
    Tensor grad, MaybeTensor y, MaybeTensor x, Tensor mask, MaybeTensor coef, MaybeTensor scale,
    MaybeTensor shift, MaybeTensor residual, bool want_residual, bool want_small) {
  MaybeTensor dresidual, dsmall, dunits;
  PlainCall call(y ? *y : *x, mask);
  if ((scale && mask.scalar_type() == call.compute_type) || !call.fits() || !call.fits_items(grad) || !call.fits_items(x) ||
      !call.fits_items(residual) || !call.fits_coef(coef) || !call.fits_small(scale) ||
      !call.fits_small(shift))
    return {std::nullopt, std::nullopt, std::nullopt, std::nullopt};
  Tensor dx = torch::stable::empty_like(grad);
  if (want_residual) dresidual = torch::stable::empty_like(grad);
  int64_t rows = (coef ? coef->size(0) : 0) + (scale ? 2 : 0);
  if (want_small && rows)
    dsmall = torch::stable::new_empty(grad, {rows, call.g.channels}, call.compute_type);
  if (mask.scalar_type() == call.compute_type) dunits = torch::stable::empty_like(mask);
  masked_backward(dx, dresidual, dsmall, dunits, grad, y, x, mask, coef, scale, shift, residual,
                  false, call.numbers());
  return {dx, dresidual, dsmall, dunits};
}

std::string instruction_set() { return has_avx2 ? "avx2" : "baseline instruction set"; }

}  // namespace fastbcd

STABLE_TORCH_LIBRARY(fastbcd_cpu, m) {
  m.def("masked_forward(Tensor(a!) y, Tensor x, Tensor mask, Tensor? coef, Tensor? scale, "
        "Tensor? shift, Tensor? residual, int[] geometry) -> ()");
  m.def("masked_backward(Tensor(a!) dx, Tensor(b!)? dresidual, Tensor(c!)? dsmall, "
        "Tensor(d!)? dunits, Tensor grad, Tensor? y, Tensor? x, Tensor mask, Tensor? coef, "
        "Tensor? scale, Tensor? shift, Tensor? residual, bool absolute, int[] geometry) -> ()");
  m.def("masked_plain(Tensor x, Tensor mask, Tensor? coef, Tensor? scale, Tensor? shift, "
        "Tensor? residual) -> Tensor?");
  m.def("masked_backward_plain(Tensor grad, Tensor? y, Tensor? x, Tensor mask, Tensor? coef, "
        "Tensor? scale, Tensor? shift, Tensor? residual, bool want_residual, bool want_small) "
        "-> (Tensor?, Tensor?, Tensor?, Tensor?)");
  m.def("instruction_set() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(fastbcd_cpu, CPU, m) {
  m.impl("masked_forward", TORCH_BOX(&fastbcd::masked_forward));
  m.impl("masked_backward", TORCH_BOX(&fastbcd::masked_backward));
}

STABLE_TORCH_LIBRARY_IMPL(fastbcd_cpu, CompositeExplicitAutograd, m) {
  m.impl("instruction_set", TORCH_BOX(&fastbcd::instruction_set));
  m.impl("masked_plain", TORCH_BOX(&fastbcd::masked_plain));
  m.impl("masked_backward_plain", TORCH_BOX(&fastbcd::masked_backward_plain));
}
