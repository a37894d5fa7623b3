// Memory, current device, streams, events and random numbers of the rig's device.
#include "rig.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/core/Generator.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

namespace rig {

constexpr int MAX_DEVICES = 8;

c10::DeviceIndex device_count() {
  static const int count = [] {
    const char* asked = std::getenv("MS_RIG_DEVICES");
    return asked ? std::min(std::atoi(asked), MAX_DEVICES) : MAX_DEVICES;
  }();
  return static_cast<c10::DeviceIndex>(count);
}

static thread_local c10::DeviceIndex current = 0;

c10::DeviceIndex current_device() {
  return current;
}

void set_current_device(c10::DeviceIndex index) {
  TORCH_CHECK(
      index >= 0 && index < device_count(),
      "rig: there is no device ", int(index), ", only ", int(device_count()));
  current = index;
}

// --- memory -------------------------------------------------------------------------------------

struct Counted {
  std::mutex mutex;
  c10::CachingDeviceAllocator::DeviceStats stats[MAX_DEVICES];

  void change(c10::DeviceIndex device, size_t bytes, bool taken) {
    constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    std::lock_guard<std::mutex> guard(mutex);
    auto& own = stats[device];
    for (auto* each : {&own.allocated_bytes, &own.active_bytes, &own.reserved_bytes,
                       &own.requested_bytes}) {
      taken ? (*each)[all].increase(bytes) : (*each)[all].decrease(bytes);
    }
    for (auto* each : {&own.allocation, &own.active}) {
      taken ? (*each)[all].increase(1) : (*each)[all].decrease(1);
    }
  }
};

static Counted& counted() {
  static auto* value = new Counted();  // outlives every tensor
  return *value;
}

// What a pointer of the device holds on to: the host's memory, counted until it goes.
struct Held {
  c10::Storage host;
  c10::DeviceIndex device;
  size_t bytes;
};

static void let_go(void* context) {
  auto* held = static_cast<Held*>(context);
  counted().change(held->device, held->bytes, false);
  delete held;
}

c10::DataPtr as_device_memory(c10::Storage host, c10::DeviceIndex device) {
  void* data = host.mutable_data();
  const size_t bytes = host.nbytes();
  counted().change(device, bytes, true);
  return {data, new Held{std::move(host), device, bytes}, &let_go, c10::Device(KIND, device)};
}

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* plain = c10::GetCPUAllocator();
    c10::Storage host(c10::Storage::use_byte_size_t(), bytes, plain->allocate(bytes), plain, false);
    // A device's memory is whatever stood there before: NaN in every float, so that a read of
    // what nobody wrote is seen. The CPU's fresh pages are zeros and hide it.
    if (bytes) {
      std::memset(host.mutable_data(), 0xff, bytes);
    }
    return as_device_memory(std::move(host), current);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(counted().mutex);
    return counted().stats[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    reset(device, &c10::CachingAllocator::Stat::reset_accumulated);
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    reset(device, &c10::CachingAllocator::Stat::reset_peak);
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const size_t total = size_t(8) << 30;
    return {total - getDeviceStats(device).allocated_bytes[0].current, total};
  }

 private:
  static void reset(c10::DeviceIndex device, void (c10::CachingAllocator::Stat::*how)()) {
    std::lock_guard<std::mutex> guard(counted().mutex);
    auto& own = counted().stats[device];
    for (auto* each : {&own.allocated_bytes, &own.active_bytes, &own.reserved_bytes,
                       &own.requested_bytes, &own.allocation, &own.active}) {
      for (auto& one : *each) {
        (one.*how)();
      }
    }
  }
};

static Memory memory;
REGISTER_ALLOCATOR(KIND, &memory);

c10::Storage as_device_storage(c10::Storage host, c10::DeviceIndex device) {
  const size_t bytes = host.nbytes();
  return c10::Storage(
      c10::Storage::use_byte_size_t(), bytes, as_device_memory(std::move(host), device), &memory,
      true);
}

// Memory of the host that a device can copy from in the background.
struct Pinned final : c10::Allocator {
  static std::mutex& mutex() {
    static auto* value = new std::mutex();
    return *value;
  }
  static std::unordered_map<const char*, size_t>& blocks() {
    static auto* value = new std::unordered_map<const char*, size_t>();
    return *value;
  }
  static void free_block(void* data) {
    std::lock_guard<std::mutex> guard(mutex());
    blocks().erase(static_cast<const char*>(data));
    std::free(data);
  }
  c10::DataPtr allocate(size_t bytes) override {
    auto* data = bytes ? static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)) : nullptr;
    if (data) {
      std::lock_guard<std::mutex> guard(mutex());
      blocks()[data] = bytes;
    }
    return {data, data, &free_block, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_block;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  static bool holds(const void* data) {
    std::lock_guard<std::mutex> guard(mutex());
    for (const auto& [begin, bytes] : blocks()) {
      if (data >= begin && data < begin + bytes) {
        return true;
      }
    }
    return false;
  }
};

static Pinned pinned;

// --- random numbers -----------------------------------------------------------------------------

// As CUDA's: sixteen bytes, a seed and how far one has drawn, apart from the CPU's numbers.
struct Draws final : c10::GeneratorImpl {
  explicit Draws(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(KIND, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t value) override {
    seed_ = value;
    offset_ = 0;
  }
  void set_offset(uint64_t value) override {
    offset_ = value;
  }
  uint64_t get_offset() const override {
    return offset_;
  }
  uint64_t current_seed() const override {
    return seed_;
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(
        state.device_type() == c10::DeviceType::CPU && state.dtype() == at::kByte,
        "RNG state must be a torch.ByteTensor");
    TORCH_CHECK(state.numel() == 16, "RNG state is wrong size: ", state.numel(), " bytes, not 16");
    std::memcpy(&seed_, state.data(), 8);
    std::memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::TensorBase state = at::detail::empty_cpu({16}, at::kByte, {}, {}, {}, {});
    auto* bytes = static_cast<char*>(state.mutable_data_ptr());
    std::memcpy(bytes, &seed_, 8);
    std::memcpy(bytes + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  uint64_t next() {
    std::lock_guard<std::mutex> guard(mutex_);
    offset_ += 4;
    uint64_t mixed = seed_ * 0x9e3779b97f4a7c15ull + offset_ * 0xbf58476d1ce4e5b9ull;
    mixed = (mixed ^ (mixed >> 31)) * 0x94d049bb133111ebull;
    return mixed ^ (mixed >> 29);
  }

 private:
  Draws* clone_impl() const override {
    auto* copy = new Draws(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int index = 0; index < MAX_DEVICES; index++) {
      made->push_back(at::make_generator<Draws>(static_cast<c10::DeviceIndex>(index)));
    }
    return made;
  }();
  return all->at(device < 0 ? current : device);
}

uint64_t next_draw(c10::DeviceIndex device) {
  return next_draw(default_generator(device));
}

uint64_t next_draw(const at::Generator& generator) {
  TORCH_CHECK(
      generator.device().type() == KIND,
      "Expected a 'rig' device type for generator but found '", generator.device().type(), "'");
  return static_cast<Draws*>(generator.unsafeGetGeneratorImpl())->next();
}

// --- current device, streams, events ------------------------------------------------------------

static thread_local c10::StreamId streams[MAX_DEVICES] = {};

// Work is done at once, so an event is the time at which it was recorded.
struct Event {
  std::chrono::steady_clock::time_point at;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return KIND;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {KIND, current};
  }
  void setDevice(c10::Device device) const override {
    set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    const auto own = with_index(device);
    return c10::Stream(c10::Stream::UNSAFE, own, streams[own.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, with_index(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override {
    return getNewStream(device);
  }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    static std::atomic<c10::StreamId> last{0};
    return c10::Stream(c10::Stream::UNSAFE, with_index(device), ++last);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    if (!*event) {
      *event = new Event();
    }
    static_cast<Event*>(*event)->at = std::chrono::steady_clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* last, const c10::DeviceIndex) const override {
    TORCH_CHECK(first && last, "Both events must be recorded before calculating elapsed time.");
    const auto time = static_cast<Event*>(last)->at - static_cast<Event*>(first)->at;
    return std::chrono::duration<double, std::milli>(time).count();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }

 private:
  static c10::Device with_index(c10::Device device) {
    return device.has_index() ? device : c10::Device(KIND, current);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// --- what torch.accelerator asks ----------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count() > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override {
    return device_count();
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_current_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = current;
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Draws>(device < 0 ? current : device);
  }
  at::Device getDeviceFromPtr(void*) const override {
    return {KIND, current};
  }
  bool isPinnedPtr(const void* data) const override {
    return Pinned::holds(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const auto device = storage.device().index();
    auto before = current;
    set_current_device(device);
    c10::DataPtr fresh = memory.allocate(bytes);
    set_current_device(before);
    if (const size_t kept = std::min(bytes, storage.nbytes())) {
      std::memcpy(fresh.get(), storage.data(), kept);
    }
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(bytes);
  }
};

static Hooks hooks;

static const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

} // namespace rig
