// The loops of norm.cpp, included once per instruction set inside a namespace of its own.
// Memory lies as rows of C channels. Loops go over a tile, some whole rows, with one accumulator
// an element, so that the compiler vectorises them whatever C is.

// dst[i] = v[i % channels] over a tile.
inline void spread(float* dst, const float* v, int64_t channels, int64_t width) {
  for (int64_t i = 0; i < width; i += channels) std::copy(v, v + channels, dst + i);
}

// out[c] += the sum over the rows of a tile of accumulators.
inline void gather(double* out, const float* sums, int64_t channels, int64_t width) {
  for (int64_t i = 0; i < width; i += channels)
    for (int64_t c = 0; c < channels; ++c) out[c] += sums[i + c];
}

// sums[0][c] = Σ d, sums[1][c] = Σ d², d = x - origin[c], over rows of x [n / C, C].
inline void statistics_part(
    double* sums, const float* x, int64_t n, const float* origin, int64_t channels) {
  const int64_t width = tile_width(channels);
  std::vector<float> buffer(3 * width);
  float *o = buffer.data(), *s0 = o + width, *s1 = s0 + width;
  spread(o, origin, channels, width);
  for (int64_t first = 0; first < n; first += width) {
    const int64_t m = std::min(width, n - first);
    const float* p = x + first;
#pragma GCC ivdep
    for (int64_t i = 0; i < m; ++i) {
      float d = p[i] - o[i];
      s0[i] += d;
      s1[i] += d * d;
    }
  }
  gather(sums, s0, channels, width);
  gather(sums + channels, s1, channels, width);
}

// dz = 0 where the bit is 1 and y <= 0, else grad;  sums[0][c] = Σ dz, sums[1][c] = Σ dz·(x - mean)
// over the images b0 .. b1 - 1 of n elements each.
inline void backward_part(
    double* sums, float* dz, const float* grad, const float* y, const float* x,
    const uint8_t* mask, const float* mean, int64_t n, int64_t b0, int64_t b1, int64_t channels) {
  const int64_t width = tile_width(channels);
  std::vector<float> buffer(4 * width);
  float *mu = buffer.data(), *bound = mu + width, *s0 = bound + width, *s1 = s0 + width;
  constexpr float removed = std::numeric_limits<float>::quiet_NaN();
  spread(mu, mean, channels, width);
  for (int64_t first = 0; first < n; first += width) {
    const int64_t m = std::min(width, n - first);
#pragma GCC ivdep
    for (int64_t i = 0; i < m; ++i) bound[i] = mask[first + i] ? 0.0f : removed;
    for (int64_t b = b0; b < b1; ++b) {
      const int64_t at = b * n + first;
      const float *g = grad + at, *out = y + at, *in = x + at;
      float* to = dz + at;
#pragma GCC ivdep
      for (int64_t i = 0; i < m; ++i) {
        float d = out[i] <= bound[i] ? 0.0f : g[i];
        to[i] = d;
        s0[i] += d;
        s1[i] += d * (in[i] - mu[i]);
      }
    }
  }
  gather(sums, s0, channels, width);
  gather(sums + channels, s1, channels, width);
}

// dx = dz·a[c] + x·b[c] + k[c] over rows; dx may be dz.
inline void input_part(
    float* dx, const float* dz, const float* x, const float* coefficients, int64_t n,
    int64_t channels) {
  const int64_t width = tile_width(channels);
  std::vector<float> buffer(3 * width);
  float *a = buffer.data(), *b = a + width, *k = b + width;
  spread(a, coefficients, channels, width);
  spread(b, coefficients + channels, channels, width);
  spread(k, coefficients + 2 * channels, channels, width);
  for (int64_t first = 0; first < n; first += width) {
    const int64_t m = std::min(width, n - first);
    float* to = dx + first;
    const float *d = dz + first, *in = x + first;
#pragma GCC ivdep
    for (int64_t i = 0; i < m; ++i) to[i] = d[i] * a[i] + in[i] * b[i] + k[i];
  }
}
