// How does torch see the device?  Through an allocator, a guard for devices, streams and events, hooks, and generators.
#include "device.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

namespace sim {
namespace {
c10::DeviceType g_type = c10::DeviceType::PrivateUse1;
thread_local int t_device = 0;
thread_local int64_t t_stream[NUM_DEVICES] = {};

c10::Device device_at(int index) { return {g_type, c10::DeviceIndex(index)}; }
c10::Stream as_c10(const Stream* stream) {
  return c10::Stream(c10::Stream::UNSAFE, device_at(stream->device), stream->id);
}
}  // namespace

c10::DeviceType type() { return g_type; }
int current_device() { return t_device; }
Stream* current(int device) { return stream(device, t_stream[device]); }
Stream* of(const c10::Stream& one) { return stream(one.device_index(), one.id()); }
int index_of(c10::Device device) { return device.index() < 0 ? t_device : device.index(); }

// ---------------------------------------------------------------- allocators
namespace {
struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* pointer = nullptr;
    if (nbytes) {
      pointer = device_alloc(t_device, nbytes, current(t_device));
      TORCH_CHECK_WITH(OutOfMemoryError, pointer, "simulated device: out of memory: ", nbytes, " bytes on device ",
                       t_device, ", which has ", usage(t_device).limit, ", of which ", usage(t_device).now, " are in use");
    }
    return {pointer, pointer, &device_free, device_at(t_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &device_free; }
  void copy_data(void* out, const void* from, size_t nbytes) const override {
    void* to = kernel_address(out);
    void* source = kernel_address(from);
    current(device_of(out))->submit([=] { memcpy(to, source, nbytes); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { device_used_on(data.get(), of(stream)); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto used = usage(device);
    for (auto* counter : {&stats.allocated_bytes, &stats.reserved_bytes}) {
      (*counter)[0].current = int64_t(used.now);
      (*counter)[0].peak = int64_t(used.peak);
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    enter(device);
    auto used = usage(device);
    return {used.limit - std::min(used.now, used.limit), used.limit};
  }
};
struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    enter(t_device);
    void* pointer = host_alloc(nbytes);
    TORCH_CHECK(pointer, "simulated device: no pinned memory for ", nbytes, " bytes");
    return {pointer, pointer, &host_free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &host_free; }
  void copy_data(void* out, const void* from, size_t nbytes) const override { memcpy(out, from, nbytes); }
};
DeviceMemory g_device_memory;
PinnedMemory g_pinned_memory;
}  // namespace

c10::Allocator* device_allocator() { return &g_device_memory; }

void resize_storage(const c10::Storage& storage, size_t nbytes) {
  c10::DeviceGuard guard(storage.device());
  auto data = g_device_memory.allocate(nbytes);
  size_t kept = std::min(nbytes, storage.nbytes());
  if (kept) g_device_memory.copy_data(data.get(), storage.data(), kept);
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr(std::move(data));
  impl->set_nbytes(nbytes);
}

// ---------------------------------------------------------------- guard
namespace {
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return g_type; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    if (device.index() != t_device) setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return device_at(t_device); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < NUM_DEVICES, "simulated device: no device ", int(device.index()));
    if (device.index() < 0) return;
    enter(device.index());
    t_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) t_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }
  c10::Stream getStream(c10::Device device) const override { return as_c10(current(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return as_c10(stream(index_of(device), 0)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return as_c10(new_stream(index_of(device))); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    t_stream[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return of(stream); }
  bool queryStream(const c10::Stream& stream) const override { return of(stream)->idle(); }
  void synchronizeStream(const c10::Stream& stream) const override { of(stream)->synchronize(); }
  void synchronizeDevice(c10::DeviceIndex device) const override { sim::synchronize(device < 0 ? t_device : device); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_used_on(data.get(), of(stream));
  }
  // An event is a pointer to its last mark: whoever waits, waits for the recording that there was.  A wait on the host
  // goes to the current device of the thread, and gives it a context, as with CUDA.
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Mark;
    *static_cast<Mark*>(*event) = of(stream)->mark();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) of(stream)->wait(*static_cast<Mark*>(event));
  }
  // Who asks for an event is about to wait for it, and asks again.
  bool queryEvent(void* event) const override {
    enter(t_device);
    if (event && !static_cast<Mark*>(event)->ask()) return false;
    check();
    return true;
  }
  void synchronizeEvent(void* event) const override {
    enter(t_device);
    if (event) static_cast<Mark*>(event)->wait();
    check();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    return static_cast<Mark*>(second)->reached_at_ms() - static_cast<Mark*>(first)->reached_at_ms();
  }
};
}  // namespace

// ---------------------------------------------------------------- generators
namespace {
// A seed and a count of draws, as CUDA's.  Each kernel has a generator of the CPU, whose seed is drawn on the host.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device)
      : GeneratorImpl(device_at(device),
                      c10::DispatchKeySet(g_type == c10::kCUDA ? c10::DispatchKey::CUDA : c10::DispatchKey::PrivateUse1)) {}
  static c10::DeviceType device_type() { return g_type; }
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(),
                "simulated device: the state of a generator is 16 bytes, not ", state.numel(), " of ", state.dtype());
    memcpy(&seed_, state.data(), 8);
    memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    memcpy(state.data_ptr(), &seed_, 8);
    memcpy(static_cast<char*>(state.data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  uint64_t draw() {
    uint64_t mixed = seed_ * 0x9E3779B97F4A7C15ull + ++offset_ * 0xD1B54A32D192ED03ull;
    mixed = (mixed ^ (mixed >> 32)) * 0xBF58476D1CE4E5B9ull;
    return mixed ^ (mixed >> 29);
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};
}  // namespace

const at::Generator& generator_of(int device) {
  static const std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int n = 0; n < NUM_DEVICES; ++n) made.push_back(at::make_generator<Generator>(c10::DeviceIndex(n)));
    return made;
  }();
  return all.at(size_t(device));
}
at::Generator default_generator(int device) { return generator_of(device); }
uint64_t draw(at::Generator given) {
  TORCH_CHECK(given.device().type() == g_type, "simulated device: a generator of ", given.device());
  std::lock_guard<std::mutex> guard(given.mutex());
  return static_cast<Generator*>(given.unsafeGetGeneratorImpl())->draw();
}

// ---------------------------------------------------------------- hooks
namespace {
// What both kinds of hooks answer.
template <typename Interface>
struct Hooks : Interface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return entered(device); }
  c10::DeviceIndex deviceCount() const override { return NUM_DEVICES; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice(device_at(device)); }
  c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(t_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice(device_at(device)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    auto before = t_device;
    Guard().uncheckedSetDevice(device_at(device));
    return c10::DeviceIndex(before);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return generator_of(device < 0 ? t_device : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(c10::DeviceIndex(device < 0 ? t_device : device));
  }
  at::Device getDeviceFromPtr(void* data) const override { return device_at(device_of(data)); }
  bool isPinnedPtr(const void* data) const override { return pinned(data, 1).whole; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &g_pinned_memory; }
};
struct OwnHooks final : Hooks<at::PrivateUse1HooksInterface> {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage, nbytes);
  }
};
struct CUDAHooks final : Hooks<at::CUDAHooksInterface> {
  bool hasCUDA() const override { return true; }
  c10::DeviceIndex current_device() const override { return c10::DeviceIndex(t_device); }
  int getNumGPUs() const override { return NUM_DEVICES; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &g_device_memory; }
  void deviceSynchronize(c10::DeviceIndex device) const override { sim::synchronize(device); }
};
// `import torch` has asked for the hooks of CUDA, and keeps the object that answers that there is no CUDA.  That object
// has nothing but its table of functions, so ours is made in its place.
static_assert(sizeof(CUDAHooks) == sizeof(at::CUDAHooksInterface));
}  // namespace

void install(bool as_cuda) {
  static bool installed = false;
  TORCH_CHECK(!installed, "simulated device: it is installed already");
  installed = true;
  if (as_cuda) g_type = c10::kCUDA;
  c10::SetAllocator(g_type, &g_device_memory);
  static const c10::impl::DeviceGuardImplRegistrar guard(g_type, new Guard);
  if (as_cuda) new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) CUDAHooks;
  else at::RegisterPrivateUse1HooksInterface(new OwnHooks);
  register_kernels();
  register_fallback();
}

}  // namespace sim
