// What autograd asks a device for, answered for CUDA devices that do not exist.
//
// fake_cuda.py builds and loads this file. Streams and events do nothing: all work
// is done by the time a call returns.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr c10::DeviceIndex DEVICES = 2;

struct FakeGuard final : c10::impl::NoOpDeviceGuardImpl<CUDA> {
  static c10::Stream stream(c10::Device device) {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  c10::Device getDevice() const override { return {CUDA, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return {CUDA, 0}; }
  c10::Stream getStream(c10::Device device) const noexcept override { return stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device); }
  c10::Stream exchangeStream(c10::Stream given) const noexcept override { return given; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    *event = const_cast<FakeGuard*>(this);  // any address but null
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
};

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)
