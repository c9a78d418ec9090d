// The loops of masked.cpp, included once per instruction set inside a namespace of its own. Loops
// over a tile are plain, so that the compiler vectorises them; `ivdep` because y may be x.

// ----------------------------------------------------------------------- the parameters of a tile

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

template <class compute>
struct TileParameters {
  alignas(64) compute scale[Cut::tile], shift[Cut::tile], coef[3][Cut::tile];

  template <int degree, bool affine, class scalar>
  void load(const Masked<scalar, compute>& a, int64_t first, int64_t m) {
    if constexpr (affine) {
      by_channel(scale, a.scale, a.g, first, m);
      if (a.shift) by_channel(shift, a.shift, a.g, first, m);
    }
    for (int k = 0; degree > 0 && k <= degree; ++k)
      by_channel(coef[k], a.coef + k * a.g.channels, a.g, first, m);
  }
};

// The parameters of one channel, indexed as those of a tile.
template <class compute>
struct RowParameters {
  struct Same {
    compute value{};
    compute operator[](int64_t) const { return value; }
  } scale, shift, coef[3];

  template <int degree, bool affine, class scalar>
  void load(const Masked<scalar, compute>& a, int64_t channel) {
    if constexpr (affine) scale = {a.scale[channel]}, shift = {a.shift[channel]};
    for (int k = 0; degree > 0 && k <= degree; ++k)
      coef[k] = {a.coef[k * a.g.channels + channel]};
  }
};

// Where element `first` of item (t, b) lies in an array that may be shared by all trials.
inline int64_t at(const Geometry& g, bool shared, int64_t t, int64_t b, int64_t first) {
  return ((shared ? 0 : t) * g.batch + b) * g.items() + first;
}

// ---------------------------------------------------------------------------------- the formulas

// z = x*scale + shift + residual
template <bool affine, bool residual, class compute, class scalar, class Parameters>
inline compute preactivation(const scalar* x, const scalar* r, const Parameters& p, int64_t i) {
  compute z = static_cast<compute>(x[i]);
  if constexpr (affine) z = z * p.scale[i] + p.shift[i];
  if constexpr (residual) z = z + static_cast<compute>(r[i]);
  return z;
}

// r(z) = z, c1*z + c0, (c2*z + c1)*z + c0
template <int degree, class compute, class Parameters>
inline compute replaced(compute z, const Parameters& p, int64_t i) {
  if constexpr (degree == 0) return z;
  else if constexpr (degree == 1) return p.coef[1][i] * z + p.coef[0][i];
  else return (p.coef[2][i] * z + p.coef[1][i]) * z + p.coef[0][i];
}

// g * r'(z)
template <int degree, class compute, class Parameters>
inline compute bent(compute g, compute z, const Parameters& p, int64_t i) {
  if constexpr (degree == 0) return g;
  else if constexpr (degree == 1) return g * p.coef[1][i];
  else return g * (2 * p.coef[2][i] * z + p.coef[1][i]);
}

// ---------------------------------------------------------------------------------------- forward

// y = max(z, 0) where the bit is 1, else r(z); kept: the bits, or the numbers in their place.
template <int degree, bool affine, bool residual, class compute, class scalar, class Unit,
          class Parameters>
void forward_tile(
    scalar* y, const scalar* x, const scalar* r, const Unit* kept, const Parameters& p, int64_t m) {
#pragma GCC ivdep
  for (int64_t i = 0; i < m; ++i) {
    compute z = preactivation<affine, residual, compute>(x, r, p, i);
    compute rectified = z < 0 ? compute(0) : z, other = replaced<degree>(z, p, i);
    if constexpr (std::is_same_v<Unit, uint8_t>) {
      y[i] = static_cast<scalar>(kept[i] ? rectified : other);
    } else if constexpr (degree == 0) {
      compute leaked = (1 - kept[i]) * z;
      y[i] = static_cast<scalar>(z > 0 ? z : leaked);
    } else {
      y[i] = static_cast<scalar>(kept[i] * rectified + (1 - kept[i]) * other);
    }
  }
}

template <int degree, bool affine, bool residual, class scalar, class compute, class Unit>
void forward_items(
    const Masked<scalar, compute>& a, const Unit* kept, const Cut& cut, int64_t begin,
    int64_t end) {
  const Geometry& g = a.g;
  TileParameters<compute> parameters;
  for (int64_t item = begin; item < end; ++item) {
    auto [first, m, chunk, b0, b1] = Part(g, cut, item);
    parameters.template load<degree, affine>(a, first, m);
    for (int64_t b = b0; b < b1; ++b)
      for (int64_t t = 0; t < g.trials; ++t)
        forward_tile<degree, affine, residual, compute>(
            a.y + at(g, false, t, b, first), a.x + at(g, g.x_shared, t, b, first),
            residual ? a.residual + at(g, g.residual_shared, t, b, first) : nullptr,
            kept + t * g.items() + first, parameters, m);
  }
}

// Without trials in channels_last order: pieces of `width`, a multiple of the channels, in the order
// of memory. What belongs to a channel is the same in every piece.
template <int degree, bool affine, bool residual, class scalar, class compute>
void forward_pieces(
    const Masked<scalar, compute>& a, int64_t width, int64_t begin, int64_t end) {
  TileParameters<compute> parameters;
  parameters.template load<degree, affine>(a, 0, width);
  int64_t n = a.g.items(), per_item = (n + width - 1) / width;
  for (int64_t k = begin; k < end; ++k) {
    int64_t first = k % per_item * width, here = k / per_item * n + first;
    forward_tile<degree, affine, residual, compute>(
        a.y + here, a.x + here, residual ? a.residual + here : nullptr, a.bits + first, parameters,
        std::min(width, n - first));
  }
}

// Without trials in channels-first order: rows of one channel of one item, in the order of memory.
template <int degree, bool affine, bool residual, class scalar, class compute>
void forward_rows(
    const Masked<scalar, compute>& a, int64_t width, int64_t begin, int64_t end) {
  RowParameters<compute> p;
  for (int64_t row = begin; row < end; ++row) {
    int64_t c = row % a.g.channels, here = row * width;
    p.template load<degree, affine>(a, c);
    forward_tile<degree, affine, residual, compute>(
        a.y + here, a.x + here, residual ? a.residual + here : nullptr, a.bits + c * width, p,
        width);
  }
}

// --------------------------------------------------------------------------------------- backward

// A bit as a number: 0 where the ReLU is kept, NaN where it was removed, so that `y <= bound` is
// `kept and y <= 0`.
template <class compute>
void bound_tile(compute* dst, const uint8_t* bits, int64_t m) {
  constexpr compute removed = std::numeric_limits<compute>::quiet_NaN();
#pragma GCC ivdep
  for (int64_t i = 0; i < m; ++i) dst[i] = bits[i] ? compute(0) : removed;
}

// Sums over the batch of one tile, in the order of Masked::rows. And what is summed over trials,
// where x or the residual is shared.
template <class compute>
struct TileSums {
  alignas(64) compute of[6][Cut::tile], dx[Cut::tile], dresidual[Cut::tile];
};

// dz = grad * (1[z > 0] where the bit is 1, else r'(z));  dx = dz*scale
// dc_i += grad * z^i where the bit is 0;  dscale += dz*x;  dshift += dz
// dunits += grad * (relu(z) - r(z)), or its absolute value
// kept: the numbers in place of the bits, or their bounds. sums: those of scale and shift.
template <Mode mode, int degree, bool affine, bool residual, bool sums, class result, class scalar,
          class compute>
void backward_tile(
    result* dx, result* dresidual, TileSums<compute>& s, const scalar* grad, const scalar* y,
    const scalar* x, const scalar* r, const compute* kept, const TileParameters<compute>& p,
    bool absolute, int64_t m) {
#pragma GCC ivdep
  for (int64_t i = 0; i < m; ++i) {
    compute g = static_cast<compute>(grad[i]), dz;
    if constexpr (mode == Mode::output) {
      dz = static_cast<compute>(y[i]) <= kept[i] ? compute(0) : g;
    } else {
      compute z = preactivation<affine, residual, compute>(x, r, p, i);
      compute passed = z <= 0 ? compute(0) : g, cleared, power;
      if constexpr (mode == Mode::soft) {
        cleared = g * (1 - kept[i]), power = z;
        if constexpr (degree == 0) dz = z > 0 ? g : cleared;
        else dz = kept[i] * passed + bent<degree>(cleared, z, p, i);
      } else {
        bool bit = kept[i] == 0;
        // 0 instead of z under a kept ReLU: an infinite z must not turn the sums into NaN.
        cleared = bit ? compute(0) : g, power = bit ? compute(0) : z;
        compute other = bent<degree>(g, power, p, i);
        dz = bit ? passed : other;
      }
      if constexpr (degree > 0 && mode != Mode::effects) {
        s.of[0][i] += cleared;
        s.of[1][i] += cleared * power;
        if constexpr (degree == 2) s.of[2][i] += cleared * (power * power);
      }
      if constexpr (mode != Mode::bits) {
        compute rectified = z <= 0 ? compute(0) : z;
        compute added = rectified - replaced<degree>(z, p, i), turned = -z;
        if constexpr (degree == 0) added = z > 0 ? compute(0) : turned;
        compute effect = g * added, size = effect < 0 ? -effect : effect;
        s.of[5][i] += absolute ? size : effect;
      }
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

template <Mode mode, int degree, bool affine, bool residual, bool sums, class scalar, class compute>
void backward_items(
    const Masked<scalar, compute>& a, const Cut& cut, int64_t begin, int64_t end) {
  const Geometry& g = a.g;
  TileParameters<compute> parameters;
  TileSums<compute> s;
  alignas(64) compute dx[Cut::tile], dz[Cut::tile];
  alignas(64) scalar unwanted[Cut::tile];  // dresidual, where none is wanted
  std::vector<compute> bounds(mode == Mode::soft ? 0 : g.trials * Cut::tile);
  for (int64_t item = begin; item < end; ++item) {
    auto [first, m, chunk, b0, b1] = Part(g, cut, item);
    parameters.template load<degree, affine>(a, first, m);
    for (int k = 0; k < 6; ++k)
      if (a.rows[k] >= 0) std::fill(s.of[k], s.of[k] + m, compute(0));
    for (int64_t t = 0; mode != Mode::soft && t < g.trials; ++t)
      bound_tile(bounds.data() + t * Cut::tile, a.bits + t * g.items() + first, m);
    for (int64_t b = b0; b < b1; ++b) {
      if (g.x_shared) std::fill(s.dx, s.dx + m, compute(0));
      if (g.residual_shared) std::fill(s.dresidual, s.dresidual + m, compute(0));
      for (int64_t t = 0; t < g.trials; ++t) {
        int64_t here = at(g, false, t, b, first), x_at = at(g, g.x_shared, t, b, first);
        const scalar *grad = a.grad + here, *y = a.y ? a.y + here : nullptr;
        const scalar* x = a.x ? a.x + x_at : nullptr;
        const scalar* r = residual ? a.residual + at(g, g.residual_shared, t, b, first) : nullptr;
        const compute* kept = mode == Mode::soft ? a.alpha + first : bounds.data() + t * Cut::tile;
        if (!g.x_shared && !g.residual_shared) {
          backward_tile<mode, degree, affine, residual, sums>(
              a.dx + here, a.dresidual ? a.dresidual + here : unwanted, s, grad, y, x, r, kept,
              parameters, a.absolute, m);
          continue;
        }
        backward_tile<mode, degree, affine, residual, sums>(
            dx, dz, s, grad, y, x, r, kept, parameters, a.absolute, m);
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
    for (int k = 0; k < 6; ++k)
      if (a.rows[k] >= 0)
        std::copy(s.of[k], s.of[k] + m, a.sums + (a.rows[k] * cut.chunks + chunk) * g.items() + first);
  }
}

// --------------------------------------------------------- from flags to template arguments

template <class F>
void by_flag(bool flag, F&& f) {
  flag ? f(std::true_type{}) : f(std::false_type{});
}

template <class F>
void by_degree(int degree, F&& f) {
  if (degree == 0) f(std::integral_constant<int, 0>{});
  else if (degree == 1) f(std::integral_constant<int, 1>{});
  else f(std::integral_constant<int, 2>{});
}

template <class scalar, class compute>
void forward(const Masked<scalar, compute>& a, const Cut& cut, int64_t begin, int64_t end) {
  by_degree(a.degree, [&](auto degree) {
    by_flag(a.residual, [&](auto residual) {
      if (a.alpha) return forward_items<degree, false, residual>(a, a.alpha, cut, begin, end);
      by_flag(a.scale, [&](auto affine) {
        forward_items<degree, affine, residual>(a, a.bits, cut, begin, end);
      });
    });
  });
}

template <class scalar, class compute>
void forward_in_order(
    const Masked<scalar, compute>& a, int64_t width, int64_t begin, int64_t end) {
  by_degree(a.degree, [&](auto degree) {
    by_flag(a.residual, [&](auto residual) {
      by_flag(a.scale, [&](auto affine) {
        auto run = a.g.channels_last ? forward_pieces<degree, affine, residual, scalar, compute>
                                     : forward_rows<degree, affine, residual, scalar, compute>;
        run(a, width, begin, end);
      });
    });
  });
}

template <class scalar, class compute>
void backward(
    const Masked<scalar, compute>& a, const Cut& cut, int64_t begin, int64_t end) {
  constexpr auto no = std::false_type{};
  auto run = [&]<Mode mode>(auto degree, auto affine, auto residual, auto sums) {
    backward_items<mode, degree, affine, residual, sums>(a, cut, begin, end);
  };
  if (a.y) {
    by_flag(a.scale, [&](auto affine) {
      by_flag(a.rows[3] >= 0, [&](auto sums) {
        if constexpr (affine || !sums)
          run.template operator()<Mode::output>(std::integral_constant<int, 0>{}, affine, no, sums);
      });
    });
    return;
  }
  by_degree(a.degree, [&](auto degree) {
    by_flag(a.residual, [&](auto residual) {
      if (a.alpha)
        run.template operator()<Mode::soft>(degree, no, residual, no);
      else if (a.rows[5] >= 0 && (degree == 0 || a.rows[0] < 0))
        run.template operator()<Mode::effects>(degree, no, residual, no);
      else if constexpr (degree > 0) {
        if (a.rows[5] >= 0)
          run.template operator()<Mode::indicator>(degree, no, residual, no);
        else
          by_flag(a.scale, [&](auto affine) {
            run.template operator()<Mode::bits>(degree, affine, residual, affine);
          });
      }
    });
  });
}
