// Tells torch of the device: its guard, allocators, generator and hooks.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace refdev {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

Stream torch_stream(int device, int64_t id) {
  return Stream(Stream::UNSAFE, Device(kDevice, DeviceIndex(device)), id);
}

int index_of(Device device) {
  return device.has_index() ? device.index() : current_device();
}

// An event of torch is a pointer to the mark it was recorded with last.
MarkPtr& mark_of(void* event) {
  return *static_cast<MarkPtr*>(event);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  Device exchangeDevice(Device device) const override {
    return Device(kDevice, DeviceIndex(exchange_device(index_of(device))));
  }
  Device getDevice() const override { return Device(kDevice, DeviceIndex(current_device())); }
  void setDevice(Device device) const override { exchange_device(index_of(device)); }
  void uncheckedSetDevice(Device device) const noexcept override { exchange_device(index_of(device)); }
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(device_count()); }

  Stream getStream(Device device) const override {
    return torch_stream(index_of(device), current_stream(index_of(device)));
  }
  Stream getDefaultStream(Device device) const override { return torch_stream(index_of(device), 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    return torch_stream(index_of(device), new_stream(index_of(device)));
  }
  Stream exchangeStream(Stream stream) const override {
    return torch_stream(stream.device_index(), exchange_stream(stream.device_index(), stream.id()));
  }
  bool queryStream(const Stream& stream) const override { return is_done(refdev::record(queue_of(stream))); }
  void synchronizeStream(const Stream& stream) const override { synchronize(queue_of(stream)); }
  void synchronizeDevice(const DeviceIndex device) const override {
    synchronize_device(device < 0 ? current_device() : device);
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new MarkPtr();
    }
    mark_of(*event) = refdev::record(queue_of(stream));
  }
  void block(void* event, const Stream& stream) const override {
    if (event != nullptr) {
      wait_in_stream(queue_of(stream), mark_of(event));
    }
  }
  bool queryEvent(void* event) const override { return event == nullptr || is_done(mark_of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      wait_on_host(mark_of(event));
    }
  }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    TORCH_CHECK(start != nullptr && end != nullptr, "Both events must be recorded before calculating elapsed time.");
    return milliseconds(mark_of(start), mark_of(end));
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<MarkPtr*>(event); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    void* address = refdev::allocate(bytes, device);
    return {address, address, &release, Device(kDevice, DeviceIndex(device))};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    synchronize_device(device_of(source));
    std::memcpy(host_alias(target), host_alias(source), bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, Stream) override {} // each queued task holds the storages it needs

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& bytes = stats.allocated_bytes[0];
    bytes.current = memory_use(device).now;
    bytes.peak = memory_use(device).peak;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override { memory_use(device).peak = memory_use(device).now; }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* address = allocate_pinned(bytes);
    return {address, address, &release_pinned, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
};

Allocator allocator;
PinnedAllocator pinned_allocator;

// Draws on the host, when a kernel is launched: the state is that of one Mersenne twister.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex device)
      : c10::GeneratorImpl(Device(kDevice, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        engine(c10::make_intrusive<at::CPUGeneratorImpl>(c10::default_rng_seed_val)) {}

  void set_current_seed(uint64_t seed) override { engine->set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "refdev's generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "refdev's generator has no offset"); }
  uint64_t current_seed() const override { return engine->current_seed(); }
  uint64_t seed() override { return engine->seed(); }
  void set_state(const c10::TensorImpl& state) override { engine->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return engine->get_state(); }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->engine->set_state(*engine->get_state());
    return copy;
  }

  c10::intrusive_ptr<at::CPUGeneratorImpl> engine;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DeviceIndex(device_count()); }
  void setCurrentDevice(DeviceIndex device) const override { exchange_device(device); }
  DeviceIndex getCurrentDevice() const override { return DeviceIndex(current_device()); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return DeviceIndex(exchange_device(device)); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    static auto* generators = new std::vector<at::Generator>([] {
      std::vector<at::Generator> made;
      for (int index = 0; index < device_count(); index++) {
        made.push_back(at::make_generator<Generator>(DeviceIndex(index)));
      }
      return made;
    }());
    return generators->at(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(DeviceIndex(device < 0 ? current_device() : device));
  }
  Device getDeviceFromPtr(void* address) const override { return Device(kDevice, DeviceIndex(device_of(address))); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

Hooks hooks;

} // namespace

Queue& queue_of(const Stream& stream) {
  return refdev::stream(stream.device_index(), stream.id());
}

c10::Allocator* device_allocator() {
  return &allocator;
}

// The bytes move in the stream, and the old block is given back there: kernels that were launched before still use it.
void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  const size_t kept = std::min(bytes, impl->nbytes());
  auto old = std::make_shared<c10::DataPtr>(impl->set_data_ptr(allocator.allocate(bytes)));
  impl->set_nbytes(bytes);
  launch(current_queue(), [old, target = host_alias(impl->data()), kept] {
    if (kept > 0) {
      std::memcpy(target, host_alias(old->get()), kept);
    }
  });
}

uint64_t draw_seed(const std::optional<at::Generator>& generator) {
  const at::Generator& chosen = generator && generator->defined() ? *generator : hooks.getDefaultGenerator(-1);
  auto* state = chosen.get<Generator>();
  std::lock_guard<std::mutex> lock(state->mutex_);
  return state->engine->random64();
}

void register_device() {
  c10::SetAllocator(kDevice, &allocator);
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

} // namespace refdev
