// The loop of kink.cpp, included once per instruction set inside a namespace of its own.

// One kink of one trial, for all images. A NaN passes where the bit is set.
template <bool fresh, class scalar>
void kink_row(scalar* __restrict c, const scalar* __restrict a, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    scalar v = -((fresh ? scalar(0) : c[i]) + a[i]);
    c[i] = v <= scalar(0) ? scalar(0) : v;
  }
}

template <class scalar>
void kink_row(scalar* c, const scalar* a, int64_t n, bool fresh) {
  fresh ? kink_row<true>(c, a, n) : kink_row<false>(c, a, n);
}
