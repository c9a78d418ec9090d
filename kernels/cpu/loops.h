// The inner loops, included once per instruction set inside a namespace of its own.
// Plain loops over a tile that the compiler vectorises; `ivdep` because y may be x itself.
// No include guard and no other includes: arguments.h has them all in front of the target pragma.

// dst[i] = v[channel of element first + i], so that the loops below need no index arithmetic.
template <class compute>
void by_channel(compute* dst, const compute* v, const Geometry& g, int64_t first, int64_t m) {
  if (g.channels_last) {
    for (int64_t i = 0, c = first % g.channels; i < m; c = 0) {
      int64_t run = std::min(g.channels - c, m - i);
      std::copy(v + c, v + c + run, dst + i);
      i += run;
    }
    return;
  }
  for (int64_t i = 0; i < m;) {
    int64_t c = (first + i) / g.inner, end = std::min(m, (c + 1) * g.inner - first);
    std::fill(dst + i, dst + end, v[c]);
    i = end;
  }
}

// A bit as a number: 0 where the ReLU is kept, NaN where it was removed. Comparisons with it
// then do the masking: `bound > z` is `kept and z < 0`, `y <= bound` is `kept and y <= 0`.
template <class compute>
void bound_tile(compute* dst, const uint8_t* mask, int64_t m) {
  constexpr compute removed = std::numeric_limits<compute>::quiet_NaN();
#pragma GCC ivdep
  for (int64_t i = 0; i < m; ++i) dst[i] = mask[i] ? compute(0) : removed;
}

template <class compute>
struct TileParameters {
  alignas(64) compute scale[Cut::tile], shift[Cut::tile], c0[Cut::tile], c1[Cut::tile],
      c2[Cut::tile];

  template <class Call>
  void load(const Call& a, int64_t first, int64_t m) {
    if (a.scale) by_channel(scale, a.scale, a.g, first, m);
    if (a.shift) by_channel(shift, a.shift, a.g, first, m);
    if (a.coef) {
      by_channel(c0, a.coef, a.g, first, m);
      by_channel(c1, a.coef + a.g.channels, a.g, first, m);
      by_channel(c2, a.coef + 2 * a.g.channels, a.g, first, m);
    }
  }
};

// Where element `first` of item (t, b) lies in an array that may be shared by all trials.
inline int64_t at(const Geometry& g, bool shared, int64_t t, int64_t b, int64_t first) {
  return ((shared ? 0 : t) * g.batch + b) * g.items() + first;
}

// z = x*scale + shift + residual
template <bool affine, bool residual, class compute, class scalar>
inline compute preactivation(
    scalar x, scalar r, compute scale, compute shift) {
  compute z = static_cast<compute>(x);
  if constexpr (affine) z = z * scale + shift;
  if constexpr (residual) z = z + static_cast<compute>(r);
  return z;
}

// ---------------------------------------------------------------------------------- forward

// relu: y = 0 where the bit is 1 and z < 0, else z.  poly: y = (c2*z + c1)*z + c0 where it is 0.
template <bool poly, bool affine, bool residual, class scalar, class compute>
void forward_tile(
    scalar* y, const scalar* x, const scalar* r, const compute* bound,
    const TileParameters<compute>& p, int64_t m) {
#pragma GCC ivdep
  for (int64_t i = 0; i < m; ++i) {
    compute z = preactivation<affine, residual, compute>(
        x[i], residual ? r[i] : x[i], p.scale[i], p.shift[i]);
    compute rectified = bound[i] > z ? bound[i] : z;
    if constexpr (poly) {
      compute other = (p.c2[i] * z + p.c1[i]) * z + p.c0[i];
      rectified = bound[i] == 0 ? rectified : other;
    }
    y[i] = static_cast<scalar>(rectified);
  }
}

template <bool poly, bool affine, bool residual, class scalar, class compute>
void forward_items(const Forward<scalar, compute>& a, const Cut& cut, int64_t begin, int64_t end) {
  const Geometry& g = a.g;
  TileParameters<compute> parameters;
  std::vector<compute> bounds(g.trials * Cut::tile);
  for (int64_t item = begin; item < end; ++item) {
    int64_t first = item % cut.tiles * Cut::tile, m = std::min(Cut::tile, g.items() - first);
    int64_t b0 = item / cut.tiles * cut.per_chunk, b1 = std::min(g.batch, b0 + cut.per_chunk);
    parameters.load(a, first, m);
    for (int64_t t = 0; t < g.trials; ++t)
      bound_tile(bounds.data() + t * Cut::tile, a.mask + t * g.items() + first, m);
    for (int64_t b = b0; b < b1; ++b)
      for (int64_t t = 0; t < g.trials; ++t)
        forward_tile<poly, affine, residual>(
            a.y + at(g, false, t, b, first), a.x + at(g, g.x_shared, t, b, first),
            residual ? a.residual + at(g, g.residual_shared, t, b, first) : nullptr,
            bounds.data() + t * Cut::tile, parameters, m);
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
void backward_items(const Backward<scalar, compute>& a, const Cut& cut, int64_t begin, int64_t end) {
  const Geometry& g = a.g;
  TileParameters<compute> parameters;
  TileSums<compute> s;
  alignas(64) compute dx[Cut::tile], dz[Cut::tile];
  alignas(64) scalar unwanted[Cut::tile];  // dresidual, where nobody asked for it
  const bool summed_over_trials = g.x_shared || g.residual_shared;
  std::vector<compute> bounds(g.trials * Cut::tile);
  constexpr int first_sum = poly ? 0 : 3, last_sum = sums ? 5 : 3;
  for (int64_t item = begin; item < end; ++item) {
    int64_t first = item % cut.tiles * Cut::tile, m = std::min(Cut::tile, g.items() - first);
    int64_t chunk = item / cut.tiles;
    int64_t b0 = chunk * cut.per_chunk, b1 = std::min(g.batch, b0 + cut.per_chunk);
    parameters.load(a, first, m);
    for (int k = first_sum; k < last_sum; ++k) std::fill(s.of[k], s.of[k] + m, compute(0));
    for (int64_t t = 0; t < g.trials; ++t)
      bound_tile(bounds.data() + t * Cut::tile, a.mask + t * g.items() + first, m);
    for (int64_t b = b0; b < b1; ++b) {
      if (g.x_shared) std::fill(s.dx, s.dx + m, compute(0));
      if (g.residual_shared) std::fill(s.dresidual, s.dresidual + m, compute(0));
      for (int64_t t = 0; t < g.trials; ++t) {
        int64_t here = at(g, false, t, b, first), x_at = at(g, g.x_shared, t, b, first);
        const scalar *grad = a.grad + here, *y = a.y + here, *x = a.x + x_at;
        const scalar* r = a.residual + at(g, g.residual_shared, t, b, first);
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
void forward(const Forward<scalar, compute>& a, const Cut& cut, int64_t begin, int64_t end) {
  auto run = a.scale ? (a.residual ? forward_items<poly, true, true, scalar, compute>
                                   : forward_items<poly, true, false, scalar, compute>)
                     : (a.residual ? forward_items<poly, false, true, scalar, compute>
                                   : forward_items<poly, false, false, scalar, compute>);
  run(a, cut, begin, end);
}

template <class scalar, class compute>
void relu_backward(const Backward<scalar, compute>& a, const Cut& cut, int64_t begin, int64_t end) {
  auto run = a.sums ? backward_items<false, true, false, true, scalar, compute>
           : a.scale ? backward_items<false, true, false, false, scalar, compute>
                     : backward_items<false, false, false, false, scalar, compute>;
  run(a, cut, begin, end);
}

template <class scalar, class compute>
void poly_backward(const Backward<scalar, compute>& a, const Cut& cut, int64_t begin, int64_t end) {
  auto run = a.scale ? (a.residual ? backward_items<true, true, true, true, scalar, compute>
                                   : backward_items<true, true, false, true, scalar, compute>)
                     : (a.residual ? backward_items<true, false, true, false, scalar, compute>
                                   : backward_items<true, false, false, false, scalar, compute>);
  run(a, cut, begin, end);
}
