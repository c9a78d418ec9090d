// What the loops of all ops share, included once per instruction set inside a namespace of its own.
// Loops over a tile are plain, so that the compiler vectorises them; `ivdep` because y may be x.
// No include guard and no other includes: arguments.h has them all before the target pragma.

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

  void load_coef(const compute* coef, const Geometry& g, int64_t first, int64_t m) {
    by_channel(c0, coef, g, first, m);
    by_channel(c1, coef + g.channels, g, first, m);
    by_channel(c2, coef + 2 * g.channels, g, first, m);
  }
};

// The parameters of one channel, indexed as those of a tile.
template <class compute>
struct RowParameters {
  struct Same {
    compute value{};
    compute operator[](int64_t) const { return value; }
  } scale, shift, c0, c1, c2;
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
