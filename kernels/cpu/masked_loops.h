// The loops of masked.cpp, included once per instruction set inside a namespace of its own.
#include "tiles.h"

// ---------------------------------------------------------------------------------- forward

// relu: y = 0 where the bit is 1 and z < 0, else z.  poly: y = (c2*z + c1)*z + c0 where it is 0.
// p: TileParameters, or RowParameters where all elements are of one channel.
template <bool poly, bool affine, bool residual, class compute, class scalar, class Parameters>
void forward_tile(
    scalar* y, const scalar* x, const scalar* r, const uint8_t* mask, const Parameters& p,
    int64_t m) {
#pragma GCC ivdep
  for (int64_t i = 0; i < m; ++i) {
    compute z = preactivation<affine, residual, compute>(
        x[i], residual ? r[i] : x[i], p.scale[i], p.shift[i]);
    compute rectified = z < 0 ? compute(0) : z, other = z;
    if constexpr (poly) other = (p.c2[i] * z + p.c1[i]) * z + p.c0[i];
    y[i] = static_cast<scalar>(mask[i] ? rectified : other);
  }
}

template <bool poly, bool affine, class scalar, class compute>
void load(
    TileParameters<compute>& p, const MaskedForward<scalar, compute>& a, int64_t first, int64_t m) {
  if constexpr (affine) {
    by_channel(p.scale, a.scale, a.g, first, m);
    by_channel(p.shift, a.shift, a.g, first, m);
  }
  if constexpr (poly) p.load_coef(a.coef, a.g, first, m);
}

template <bool poly, bool affine, bool residual, class scalar, class compute>
void forward_items(
    const MaskedForward<scalar, compute>& a, const Cut& cut, int64_t begin, int64_t end) {
  const Geometry& g = a.g;
  TileParameters<compute> parameters;
  for (int64_t item = begin; item < end; ++item) {
    auto [first, m, chunk, b0, b1] = Part(g, cut, item);
    load<poly, affine>(parameters, a, first, m);
    for (int64_t b = b0; b < b1; ++b)
      for (int64_t t = 0; t < g.trials; ++t)
        forward_tile<poly, affine, residual, compute>(
            a.y + at(g, false, t, b, first), a.x + at(g, g.x_shared, t, b, first),
            residual ? a.residual + at(g, g.residual_shared, t, b, first) : nullptr,
            a.mask + t * g.items() + first, parameters, m);
  }
}

// Without trials in channels_last order: pieces of `width`, a multiple of the channels, in the order
// of memory. What belongs to a channel is the same in every piece.
template <bool poly, bool affine, bool residual, class scalar, class compute>
void forward_pieces(
    const MaskedForward<scalar, compute>& a, int64_t width, int64_t begin, int64_t end) {
  TileParameters<compute> parameters;
  load<poly, affine>(parameters, a, 0, width);
  int64_t n = a.g.items(), per_item = (n + width - 1) / width;
  for (int64_t k = begin; k < end; ++k) {
    int64_t first = k % per_item * width, here = k / per_item * n + first;
    forward_tile<poly, affine, residual, compute>(
        a.y + here, a.x + here, residual ? a.residual + here : nullptr, a.mask + first, parameters,
        std::min(width, n - first));
  }
}

// Without trials in channels-first order: rows of one channel of one item, in the order of memory.
template <bool poly, bool affine, bool residual, class scalar, class compute>
void forward_rows(
    const MaskedForward<scalar, compute>& a, int64_t width, int64_t begin, int64_t end) {
  RowParameters<compute> p;
  const int64_t channels = a.g.channels;
  for (int64_t row = begin; row < end; ++row) {
    int64_t c = row % channels, here = row * width;
    if constexpr (affine) p.scale = {a.scale[c]}, p.shift = {a.shift[c]};
    if constexpr (poly)
      p.c0 = {a.coef[c]}, p.c1 = {a.coef[channels + c]}, p.c2 = {a.coef[2 * channels + c]};
    forward_tile<poly, affine, residual, compute>(
        a.y + here, a.x + here, residual ? a.residual + here : nullptr, a.mask + c * width, p,
        width);
  }
}

// --------------------------------------------------------------------------------- backward

// Sums over the batch of one tile: [0..2] dcoef, [3] dscale, [4] dshift. And what is summed
// over trials, where x or the residual is shared.
template <class compute>
struct TileSums {
  alignas(64) compute of[5][Cut::tile], dx[Cut::tile], dresidual[Cut::tile];
};

// relu: dz = 0 where the bit is 1 and y <= 0, else grad.
// poly: dz = grad * (2*c2*z + c1) where the bit is 0;  dc_i += grad * z^i there.
// dx = dz*scale;  dscale += dz*x;  dshift += dz.
template <bool poly, bool affine, bool residual, bool sums, class result, class scalar, class compute>
void backward_tile(
    result* dx, result* dresidual, TileSums<compute>& s, const scalar* grad, const scalar* y,
    const scalar* x, const scalar* r, const compute* bound, const TileParameters<compute>& p,
    int64_t m) {
#pragma GCC ivdep
  for (int64_t i = 0; i < m; ++i) {
    compute g = static_cast<compute>(grad[i]);
    compute dz;
    if constexpr (poly) {
      compute z = preactivation<affine, residual, compute>(
          x[i], residual ? r[i] : x[i], p.scale[i], p.shift[i]);
      bool kept = bound[i] == 0;
      compute rectified = z <= 0 ? compute(0) : g;
      // 0 instead of z under a kept ReLU: an infinite z must not turn the sums into NaN.
      compute q = kept ? compute(0) : z, cleared = kept ? compute(0) : g;
      dz = kept ? rectified : g * (2 * p.c2[i] * q + p.c1[i]);
      s.of[0][i] += cleared;
      s.of[1][i] += cleared * q;
      s.of[2][i] += cleared * (q * q);
    } else {
      dz = static_cast<compute>(y[i]) <= bound[i] ? compute(0) : g;
    }
    if constexpr (sums) {
      s.of[3][i] += dz * static_cast<compute>(x[i]);
      s.of[4][i] += dz;
    }
    dresidual[i] = static_cast<result>(dz);
    dx[i] = static_cast<result>(affine ? dz * p.scale[i] : dz);
  }
}

template <class scalar, class compute>
void put(scalar* dst, const compute* src, int64_t m) {
#pragma GCC ivdep
  for (int64_t i = 0; i < m; ++i) dst[i] = static_cast<scalar>(src[i]);
}

template <class compute>
void accumulate(compute* dst, const compute* src, int64_t m) {
#pragma GCC ivdep
  for (int64_t i = 0; i < m; ++i) dst[i] += src[i];
}

template <bool poly, bool affine, bool residual, bool sums, class scalar, class compute>
void backward_items(
    const MaskedBackward<scalar, compute>& a, const Cut& cut, int64_t begin, int64_t end) {
  const Geometry& g = a.g;
  TileParameters<compute> parameters;
  TileSums<compute> s;
  alignas(64) compute dx[Cut::tile], dz[Cut::tile];
  alignas(64) scalar unwanted[Cut::tile];  // dresidual, where none is wanted
  const bool summed_over_trials = g.x_shared || g.residual_shared;
  std::vector<compute> bounds(g.trials * Cut::tile);
  constexpr int first_sum = poly ? 0 : 3, last_sum = sums ? 5 : 3;
  for (int64_t item = begin; item < end; ++item) {
    auto [first, m, chunk, b0, b1] = Part(g, cut, item);
    if constexpr (affine) by_channel(parameters.scale, a.scale, g, first, m);
    if constexpr (affine && poly) by_channel(parameters.shift, a.shift, g, first, m);
    if constexpr (poly) parameters.load_coef(a.coef, g, first, m);
    for (int k = first_sum; k < last_sum; ++k) std::fill(s.of[k], s.of[k] + m, compute(0));
    for (int64_t t = 0; t < g.trials; ++t)
      bound_tile(bounds.data() + t * Cut::tile, a.mask + t * g.items() + first, m);
    for (int64_t b = b0; b < b1; ++b) {
      if (g.x_shared) std::fill(s.dx, s.dx + m, compute(0));
      if (g.residual_shared) std::fill(s.dresidual, s.dresidual + m, compute(0));
      for (int64_t t = 0; t < g.trials; ++t) {
        int64_t here = at(g, false, t, b, first), x_at = at(g, g.x_shared, t, b, first);
        const scalar *grad = a.grad + here, *y = poly ? nullptr : a.y + here;
        const scalar* x = poly || sums ? a.x + x_at : nullptr;
        const scalar* r = residual ? a.residual + at(g, g.residual_shared, t, b, first) : nullptr;
        const compute* bound = bounds.data() + t * Cut::tile;
        if (!summed_over_trials) {
          backward_tile<poly, affine, residual, sums>(
              a.dx + here, a.dresidual ? a.dresidual + here : unwanted, s, grad, y, x, r, bound,
              parameters, m);
          continue;
        }
        backward_tile<poly, affine, residual, sums>(
            dx, dz, s, grad, y, x, r, bound, parameters, m);
        if (g.x_shared)
          accumulate(s.dx, dx, m);
        else
          put(a.dx + here, dx, m);
        if (a.dresidual && g.residual_shared)
          accumulate(s.dresidual, dz, m);
        else if (a.dresidual)
          put(a.dresidual + here, dz, m);
      }
      int64_t shared_at = b * g.items() + first;
      if (g.x_shared) put(a.dx + shared_at, s.dx, m);
      if (a.dresidual && g.residual_shared) put(a.dresidual + shared_at, s.dresidual, m);
    }
    for (int k = first_sum; k < last_sum; ++k)
      std::copy(s.of[k], s.of[k] + m,
                a.sums + ((k - first_sum) * cut.chunks + chunk) * g.items() + first);
  }
}

// --------------------------------------------------------- from flags to template arguments

template <bool poly, class scalar, class compute>
void forward(
    const MaskedForward<scalar, compute>& a, const Cut& cut, int64_t begin, int64_t end) {
  auto run = a.scale ? (a.residual ? forward_items<poly, true, true, scalar, compute>
                                   : forward_items<poly, true, false, scalar, compute>)
                     : (a.residual ? forward_items<poly, false, true, scalar, compute>
                                   : forward_items<poly, false, false, scalar, compute>);
  run(a, cut, begin, end);
}

template <bool poly, class scalar, class compute>
void forward_in_order(
    const MaskedForward<scalar, compute>& a, int64_t width, int64_t begin, int64_t end) {
  auto in_order = [&]<bool affine, bool residual>() {
    auto run = a.g.channels_last ? forward_pieces<poly, affine, residual, scalar, compute>
                                 : forward_rows<poly, affine, residual, scalar, compute>;
    run(a, width, begin, end);
  };
  if (a.scale && a.residual) in_order.template operator()<true, true>();
  else if (a.scale) in_order.template operator()<true, false>();
  else if (a.residual) in_order.template operator()<false, true>();
  else in_order.template operator()<false, false>();
}

template <bool poly, class scalar, class compute>
void backward(
    const MaskedBackward<scalar, compute>& a, const Cut& cut, int64_t begin, int64_t end) {
  if constexpr (poly) {
    auto run = a.scale ? (a.residual ? backward_items<true, true, true, true, scalar, compute>
                                     : backward_items<true, true, false, true, scalar, compute>)
                       : (a.residual ? backward_items<true, false, true, false, scalar, compute>
                                     : backward_items<true, false, false, false, scalar, compute>);
    run(a, cut, begin, end);
  } else {
    auto run = a.sums ? backward_items<false, true, false, true, scalar, compute>
             : a.scale ? backward_items<false, true, false, false, scalar, compute>
                       : backward_items<false, false, false, false, scalar, compute>;
    run(a, cut, begin, end);
  }
}
