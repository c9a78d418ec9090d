// norm_relu as operators `fastbcd_cpu::*`: batch norm in train mode, residual and masked ReLU.
//
// float32 in channels_last order only. Sums follow a cut of the batch that does not depend on the
// number of threads, and are added up in its order, in double.
#include <cmath>

#include "masked.h"

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
void write_statistics(float* statistics, const float* x, int64_t rows, int64_t channels) {
  std::vector<double> parts(2 * channels * std::min(most_chunks, rows));
  // Deviations from the first row: squares of the values themselves would cancel.
  in_chunks(rows, [&](int64_t k, int64_t begin, int64_t end) {
    FASTBCD_RUN(statistics_part, parts.data() + 2 * channels * k, x + begin * channels,
                (end - begin) * channels, x, channels);
  });
  std::vector<double> sums = total(parts, channels);
  for (int64_t c = 0; c < channels; ++c) {
    double mean = sums[c] / rows, square = sums[channels + c] / rows;
    statistics[c] = static_cast<float>(x[c] + mean);
    statistics[channels + c] = static_cast<float>(std::max(0.0, square - mean * mean));
  }
}

Arguments<float, float> float_arguments(const std::vector<int64_t>& numbers) {
  Geometry g = geometry(numbers);
  STD_TORCH_CHECK(g.trials == 1 && (g.channels_last || g.inner == 1 || g.channels == 1),
                  "norm_relu is for channels_last images without trials");
  return {g, ScalarType::Float, ScalarType::Float};
}

// y = masked_relu(norm(x)*weight + bias + residual); statistics [2, C] = mean, biased variance.
void norm_relu_forward(
    Tensor y, Tensor statistics, Tensor x, Tensor weight, Tensor bias, Tensor mask,
    MaybeTensor residual, double eps, std::vector<int64_t> numbers) {
  Arguments<float, float> a = float_arguments(numbers);
  const Geometry& g = a.g;
  OrderedMask bits(mask, g);
  float *mean = a.by_channel("statistics", statistics, 2), *variance = mean + g.channels;
  const float *input = a.items("x", x), *w = a.by_channel("weight", weight, 1);
  const float* b = a.by_channel("bias", bias, 1);
  write_statistics(mean, input, g.batch * g.inner, g.channels);
  std::vector<float> scale(g.channels), shift(g.channels);
  for (int64_t c = 0; c < g.channels; ++c) {
    scale[c] = w[c] * (1 / std::sqrt(variance[c] + static_cast<float>(eps)));
    shift[c] = b[c] - mean[c] * scale[c];
  }
  run_forward({.g = g, .x = input, .residual = a.items("residual", residual), .bits = bits,
               .scale = scale.data(), .shift = shift.data(), .y = a.items("y", y)});
}

// dx, dparameters [2, C] = dweight, dbias, and dresidual where it is given.
void norm_relu_backward(
    Tensor dx, MaybeTensor dresidual, Tensor dparameters, Tensor grad, Tensor y, Tensor x,
    Tensor weight, Tensor mask, Tensor statistics, double eps, std::vector<int64_t> numbers) {
  Arguments<float, float> a = float_arguments(numbers);
  const Geometry& g = a.g;
  OrderedMask bits(mask, g);
  int64_t n = g.items(), rows = g.batch * g.inner, channels = g.channels;
  const float *from = a.items("grad", grad), *result = a.items("y", y), *input = a.items("x", x);
  const float *mean = a.by_channel("statistics", statistics, 2), *variance = mean + channels;
  const float* w = a.by_channel("weight", weight, 1);
  float *to = a.items("dx", dx), *dz = a.items("dresidual", dresidual);
  if (!dz) dz = to;
  // dz, and for each channel Σ dz and Σ dz·(x - mean)
  std::vector<double> parts(2 * channels * std::min(most_chunks, g.batch));
  in_chunks(g.batch, [&](int64_t k, int64_t begin, int64_t end) {
    FASTBCD_RUN(backward_part, parts.data() + 2 * channels * k, dz, from, result, input, bits,
                mean, n, begin, end, channels);
  });
  std::vector<double> sums = total(parts, channels);
  // dx = dz·scale + x·slope + constant
  float *dweight = a.by_channel("dparameters", dparameters, 2), *dbias = dweight + channels;
  std::vector<float> coefficients(3 * channels);
  for (int64_t c = 0; c < channels; ++c) {
    float inverse = 1 / std::sqrt(variance[c] + static_cast<float>(eps)), scale = w[c] * inverse;
    dbias[c] = static_cast<float>(sums[c]);
    dweight[c] = static_cast<float>(sums[channels + c]) * inverse;
    float slope = -scale * inverse * dweight[c] / rows;
    coefficients[c] = scale;
    coefficients[channels + c] = slope;
    coefficients[2 * channels + c] = -scale * dbias[c] / rows - slope * mean[c];
  }
  in_chunks(rows, [&](int64_t, int64_t begin, int64_t end) {
    int64_t at = begin * channels;
    FASTBCD_RUN(input_part, to + at, dz + at, input + at, coefficients.data(),
                (end - begin) * channels, channels);
  });
}

}  // namespace fastbcd

STABLE_TORCH_LIBRARY_FRAGMENT(fastbcd_cpu, m) {
  m.def("norm_relu_forward(Tensor(a!) y, Tensor(b!) statistics, Tensor x, Tensor weight, "
        "Tensor bias, Tensor mask, Tensor? residual, float eps, int[] geometry) -> ()");
  m.def("norm_relu_backward(Tensor(a!) dx, Tensor(b!)? dresidual, Tensor(c!) dparameters, "
        "Tensor grad, Tensor y, Tensor x, Tensor weight, Tensor mask, Tensor statistics, "
        "float eps, int[] geometry) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastbcd_cpu, CPU, m) {
  m.impl("norm_relu_forward", TORCH_BOX(&fastbcd::norm_relu_forward));
  m.impl("norm_relu_backward", TORCH_BOX(&fastbcd::norm_relu_backward));
}
