// The loops of soft.cpp, included once per instruction set inside a namespace of its own.
#include "tiles.h"

// y = z where z > 0, else (1 - a)*z
template <bool residual, class scalar, class compute>
void soft_relu_forward_tile(
    scalar* y, const scalar* x, const scalar* r, const compute* alpha, int64_t m) {
#pragma GCC ivdep
  for (int64_t i = 0; i < m; ++i) {
    compute z = preactivation<false, residual, compute>(
        x[i], residual ? r[i] : x[i], compute(0), compute(0));
    compute leaked = (1 - alpha[i]) * z;
    y[i] = static_cast<scalar>(z > 0 ? z : leaked);
  }
}

// dz = grad where z > 0, else grad*(1 - a);  da += 0 where z > 0, else grad*(-z)
template <bool residual, class scalar, class compute>
void soft_relu_backward_tile(
    scalar* dx, compute* dalpha, const scalar* grad, const scalar* x, const scalar* r,
    const compute* alpha, int64_t m) {
#pragma GCC ivdep
  for (int64_t i = 0; i < m; ++i) {
    compute g = static_cast<compute>(grad[i]);
    compute z = preactivation<false, residual, compute>(
        x[i], residual ? r[i] : x[i], compute(0), compute(0));
    compute leaked = g * (1 - alpha[i]), turned = g * -z;
    dx[i] = static_cast<scalar>(z > 0 ? g : leaked);
    dalpha[i] += z > 0 ? compute(0) : turned;
  }
}

// As poly in backward_tile, and for every unit  dm += grad*(relu(z) - poly(z)).
template <bool residual, class scalar, class compute>
void indicator_poly_backward_tile(
    scalar* dx, compute (*sums)[Cut::tile], const scalar* grad, const scalar* x, const scalar* r,
    const compute* bound, const TileParameters<compute>& p, int64_t m) {
#pragma GCC ivdep
  for (int64_t i = 0; i < m; ++i) {
    compute g = static_cast<compute>(grad[i]);
    compute z = preactivation<false, residual, compute>(
        x[i], residual ? r[i] : x[i], compute(0), compute(0));
    bool kept = bound[i] == 0;
    compute rectified = z <= 0 ? compute(0) : z, passed = z <= 0 ? compute(0) : g;
    // 0 instead of z under a kept ReLU: an infinite z must not turn the sums into NaN.
    compute q = kept ? compute(0) : z, cleared = kept ? compute(0) : g;
    compute bent = g * (2 * p.c2[i] * q + p.c1[i]);
    sums[0][i] += cleared;
    sums[1][i] += cleared * q;
    sums[2][i] += cleared * (q * q);
    sums[3][i] += g * (rectified - ((p.c2[i] * z + p.c1[i]) * z + p.c0[i]));
    dx[i] = static_cast<scalar>(kept ? passed : bent);
  }
}

// ------------------------------------------------------------------------- over the work items

template <bool residual, class scalar, class compute>
void soft_relu_forward_items(
    const SoftReluForward<scalar, compute>& a, const Cut& cut, int64_t begin, int64_t end) {
  for (int64_t item = begin; item < end; ++item) {
    Part part(a.g, cut, item);
    for (int64_t b = part.b0; b < part.b1; ++b) {
      int64_t here = b * a.g.items() + part.first;
      soft_relu_forward_tile<residual>(
          a.y + here, a.x + here, residual ? a.residual + here : nullptr, a.alpha + part.first,
          part.m);
    }
  }
}

template <bool residual, class scalar, class compute>
void soft_relu_backward_items(
    const SoftReluBackward<scalar, compute>& a, const Cut& cut, int64_t begin, int64_t end) {
  for (int64_t item = begin; item < end; ++item) {
    Part part(a.g, cut, item);
    compute* sums = a.sums + part.chunk * a.g.items() + part.first;
    std::fill(sums, sums + part.m, compute(0));
    for (int64_t b = part.b0; b < part.b1; ++b) {
      int64_t here = b * a.g.items() + part.first;
      soft_relu_backward_tile<residual>(
          a.dx + here, sums, a.grad + here, a.x + here, residual ? a.residual + here : nullptr,
          a.alpha + part.first, part.m);
    }
  }
}

template <bool residual, class scalar, class compute>
void indicator_poly_backward_items(
    const IndicatorPolyBackward<scalar, compute>& a, const Cut& cut, int64_t begin, int64_t end) {
  TileParameters<compute> parameters;
  alignas(64) compute sums[4][Cut::tile], bound[Cut::tile];
  for (int64_t item = begin; item < end; ++item) {
    Part part(a.g, cut, item);
    parameters.load_coef(a.coef, a.g, part.first, part.m);
    bound_tile(bound, a.mask + part.first, part.m);
    for (auto& row : sums) std::fill(row, row + part.m, compute(0));
    for (int64_t b = part.b0; b < part.b1; ++b) {
      int64_t here = b * a.g.items() + part.first;
      indicator_poly_backward_tile<residual>(
          a.dx + here, sums, a.grad + here, a.x + here, residual ? a.residual + here : nullptr,
          bound, parameters, part.m);
    }
    for (int64_t k = 0; k < 4; ++k)
      std::copy(sums[k], sums[k] + part.m,
                a.sums + (k * cut.chunks + part.chunk) * a.g.items() + part.first);
  }
}

template <class scalar, class compute>
void soft_relu_forward(
    const SoftReluForward<scalar, compute>& a, const Cut& cut, int64_t begin, int64_t end) {
  auto run = a.residual ? soft_relu_forward_items<true, scalar, compute>
                        : soft_relu_forward_items<false, scalar, compute>;
  run(a, cut, begin, end);
}

template <class scalar, class compute>
void soft_relu_backward(
    const SoftReluBackward<scalar, compute>& a, const Cut& cut, int64_t begin, int64_t end) {
  auto run = a.residual ? soft_relu_backward_items<true, scalar, compute>
                        : soft_relu_backward_items<false, scalar, compute>;
  run(a, cut, begin, end);
}

template <class scalar, class compute>
void indicator_poly_backward(
    const IndicatorPolyBackward<scalar, compute>& a, const Cut& cut, int64_t begin, int64_t end) {
  auto run = a.residual ? indicator_poly_backward_items<true, scalar, compute>
                        : indicator_poly_backward_items<false, scalar, compute>;
  run(a, cut, begin, end);
}
