// The loops of saliency.cpp, included once per instruction set inside a namespace of its own.
#include "tiles.h"

// What a removal adds to a kept unit's output; dx; the sum over the batch:
// relu:  added = min(z, 0);          dz = 0 where the bit is 1 and z <= 0, else grad
// poly:  added = poly(z) - relu(z);  dz = grad*(2*c2*z + c1) where the bit is 0
// sum += grad*added, or its absolute value
template <bool poly, bool absolute, bool residual, class scalar, class compute>
void saliency_tile(
    scalar* dx, compute* sums, const scalar* grad, const scalar* x, const scalar* r,
    const compute* bound, const TileParameters<compute>& p, int64_t m) {
#pragma GCC ivdep
  for (int64_t i = 0; i < m; ++i) {
    compute g = static_cast<compute>(grad[i]);
    compute z = preactivation<false, residual, compute>(
        x[i], residual ? r[i] : x[i], compute(0), compute(0));
    bool kept = bound[i] == 0;
    compute passed = z <= 0 ? compute(0) : g, other = g, added = z > 0 ? compute(0) : z;
    if constexpr (poly) {
      compute rectified = z <= 0 ? compute(0) : z;
      added = ((p.c2[i] * z + p.c1[i]) * z + p.c0[i]) - rectified;
      other = g * (2 * p.c2[i] * z + p.c1[i]);
    }
    compute effect = g * added;
    if constexpr (absolute) effect = effect < 0 ? -effect : effect;
    dx[i] = static_cast<scalar>(kept ? passed : other);
    sums[i] += effect;
  }
}

template <bool poly, bool absolute, bool residual, class scalar, class compute>
void saliency_items(
    const SaliencyBackward<scalar, compute>& a, const Cut& cut, int64_t begin, int64_t end) {
  TileParameters<compute> parameters;
  alignas(64) compute bound[Cut::tile];
  for (int64_t item = begin; item < end; ++item) {
    Part part(a.g, cut, item);
    if constexpr (poly) parameters.load_coef(a.coef, a.g, part.first, part.m);
    bound_tile(bound, a.mask + part.first, part.m);
    compute* sums = a.sums + part.chunk * a.g.items() + part.first;
    std::fill(sums, sums + part.m, compute(0));
    for (int64_t b = part.b0; b < part.b1; ++b) {
      int64_t here = b * a.g.items() + part.first;
      saliency_tile<poly, absolute, residual>(
          a.dx + here, sums, a.grad + here, a.x + here, residual ? a.residual + here : nullptr,
          bound, parameters, part.m);
    }
  }
}

template <bool poly, bool absolute, class scalar, class compute>
void saliency_by_residual(
    const SaliencyBackward<scalar, compute>& a, const Cut& cut, int64_t begin, int64_t end) {
  auto run = a.residual ? saliency_items<poly, absolute, true, scalar, compute>
                        : saliency_items<poly, absolute, false, scalar, compute>;
  run(a, cut, begin, end);
}

template <class scalar, class compute>
void saliency_backward(
    const SaliencyBackward<scalar, compute>& a, const Cut& cut, int64_t begin, int64_t end) {
  auto run = a.coef ? (a.absolute ? saliency_by_residual<true, true, scalar, compute>
                                  : saliency_by_residual<true, false, scalar, compute>)
                    : (a.absolute ? saliency_by_residual<false, true, scalar, compute>
                                  : saliency_by_residual<false, false, scalar, compute>);
  run(a, cut, begin, end);
}
