// Batch norm in train mode around the masked ReLU, as operators `fastbcd_cpu::*`: the statistics of
// a batch, and the backward of norm and activation in two passes over memory.
//
// float32 in channels_last order only. Sums follow a cut of the batch that does not depend on the
// number of threads, and are added up in its order, in double.
#include "arguments.h"

namespace fastbcd {

constexpr int64_t most_chunks = 32;

// A tile: whole rows of `channels`, at least a few vectors of them.
inline int64_t tile_width(int64_t channels) {
  return channels * std::max<int64_t>(1, 512 / channels);
}

}  // namespace fastbcd

#define FASTBCD_LOOPS "norm_loops.h"
#include "both_targets.h"

namespace fastbcd {

float* floats(const char* name, const Tensor& t, int64_t numel) {
  return pointer<float>(name, t, numel, ScalarType::Float);
}

// run(chunk, begin, end) for the chunks of `size` things, on torch's threads.
template <class F>
void in_chunks(int64_t size, F&& run) {
  int64_t chunks = std::min(most_chunks, size);
  torch::stable::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) run(k, k * size / chunks, (k + 1) * size / chunks);
  });
}

// The sums of all chunks, [chunks][2][C] -> [2][C].
std::vector<double> total(const std::vector<double>& parts, int64_t channels) {
  std::vector<double> sums(2 * channels);
  for (size_t i = 0; i < parts.size(); ++i) sums[i % sums.size()] += parts[i];
  return sums;
}

// statistics [2, C]: mean and biased variance of x [rows, C].
void norm_statistics(Tensor statistics, Tensor x, int64_t channels) {
  int64_t rows = x.numel() / channels;
  const float* p = floats("x", x, rows * channels);
  float* out = floats("statistics", statistics, 2 * channels);
  std::vector<double> parts(2 * channels * std::min(most_chunks, rows));
  // Deviations from the first row: squares of the values themselves would cancel.
  in_chunks(rows, [&](int64_t k, int64_t begin, int64_t end) {
    FASTBCD_RUN(statistics_part, parts.data() + 2 * channels * k, p + begin * channels,
                (end - begin) * channels, p, channels);
  });
  std::vector<double> sums = total(parts, channels);
  for (int64_t c = 0; c < channels; ++c) {
    double mean = sums[c] / rows, square = sums[channels + c] / rows;
    out[c] = static_cast<float>(p[c] + mean);
    out[channels + c] = static_cast<float>(std::max(0.0, square - mean * mean));
  }
}

// dz [batch, n] and sums [2, C] = Σ dz, Σ dz·(x - mean), for y = masked_relu(norm(x) + ...).
void norm_backward(
    Tensor dz, Tensor sums, Tensor grad, Tensor y, Tensor x, Tensor mask, Tensor mean,
    std::vector<int64_t> numbers) {
  Geometry g = geometry(numbers);
  STD_TORCH_CHECK(g.trials == 1 && g.channels_last, "norm_backward is for channels_last images");
  std::vector<uint8_t> scratch;
  const uint8_t* bits = ordered_mask(mask, g, scratch);
  int64_t n = g.items(), all = g.batch * n;
  float *to = floats("dz", dz, all), *out = floats("sums", sums, 2 * g.channels);
  const float *from = floats("grad", grad, all), *result = floats("y", y, all);
  const float *input = floats("x", x, all), *centre = floats("mean", mean, g.channels);
  std::vector<double> parts(2 * g.channels * std::min(most_chunks, g.batch));
  in_chunks(g.batch, [&](int64_t k, int64_t begin, int64_t end) {
    FASTBCD_RUN(backward_part, parts.data() + 2 * g.channels * k, to, from, result, input, bits,
                centre, n, begin, end, g.channels);
  });
  std::vector<double> found = total(parts, g.channels);
  std::copy(found.begin(), found.end(), out);
}

// dx = dz·a + x·b + k by channel, coefficients [3, C] = a, b, k.
void norm_input_gradient(
    Tensor dx, Tensor dz, Tensor x, Tensor coefficients, int64_t channels) {
  int64_t rows = x.numel() / channels;
  float* to = floats("dx", dx, rows * channels);
  const float *from = floats("dz", dz, rows * channels), *input = floats("x", x, rows * channels);
  const float* by = floats("coefficients", coefficients, 3 * channels);
  in_chunks(rows, [&](int64_t, int64_t begin, int64_t end) {
    int64_t at = begin * channels;
    FASTBCD_RUN(input_part, to + at, from + at, input + at, by, (end - begin) * channels, channels);
  });
}

}  // namespace fastbcd

STABLE_TORCH_LIBRARY_FRAGMENT(fastbcd_cpu, m) {
  m.def("norm_statistics(Tensor(a!) statistics, Tensor x, int channels) -> ()");
  m.def("norm_backward(Tensor(a!) dz, Tensor(b!) sums, Tensor grad, Tensor y, Tensor x, "
        "Tensor mask, Tensor mean, int[] geometry) -> ()");
  m.def("norm_input_gradient(Tensor(a!) dx, Tensor dz, Tensor x, Tensor coefficients, "
        "int channels) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastbcd_cpu, CPU, m) {
  m.impl("norm_statistics", TORCH_BOX(&fastbcd::norm_statistics));
  m.impl("norm_backward", TORCH_BOX(&fastbcd::norm_backward));
  m.impl("norm_input_gradient", TORCH_BOX(&fastbcd::norm_input_gradient));
}
