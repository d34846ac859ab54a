// The rehearsal device itself: current card, streams, events, generators, and the hooks by which PyTorch finds them.
#pragma once

#include <chrono>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace rehearsal {

// A generator of a card: a host generator of its own, whose numbers are those of the host for the same seed.
struct CardGenerator final : c10::GeneratorImpl {
  explicit CardGenerator(c10::DeviceIndex card)
      : CardGenerator(card, at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val)) {}
  CardGenerator(c10::DeviceIndex card, at::Generator host)
      : GeneratorImpl(c10::Device(kCard, card), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(host)) {}
  void set_current_seed(uint64_t seed) override {
    host.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    host.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return host.get_offset();
  }
  uint64_t current_seed() const override {
    return host.current_seed();
  }
  uint64_t seed() override {
    return host.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  CardGenerator* clone_impl() const override {
    return new CardGenerator(device().index(), host.clone());
  }
  at::Generator host;
};

// The generator that operators of a card use unless they are passed one.
inline const at::Generator& default_generator(c10::DeviceIndex card) {
  static const std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int number = 0; number < card_count(); ++number) {
      made.push_back(at::make_generator<CardGenerator>(static_cast<c10::DeviceIndex>(number)));
    }
    return made;
  }();
  return all[checked_card(card < 0 ? current_card() : card)];
}

// The host generator inside a card's.
inline at::Generator& host_generator(const at::Generator& generator) {
  return static_cast<CardGenerator*>(generator.unsafeGetGeneratorImpl())->host;
}

inline c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_card();
}

// Work is complete when the call returns, so streams and events order nothing; what they refuse, they refuse.
struct CardGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kCard;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {kCard, current_card()};
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.type() == kCard, "npu: ", device, " is no card");
    current_card() = checked_card(index_of(device));
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index() && device.index() < card_count()) {
      current_card() = device.index();
    }
  }
  c10::Stream getStream(c10::Device device) const override {
    return made(current_stream()[checked_card(index_of(device))], device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return made(0, device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> last{0};
    return made(++last, device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_stream()[checked_card(stream.device_index())] = stream.id();
    return before;
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex card, const c10::EventFlag) const override {
    TORCH_CHECK(card == -1 || card == stream.device_index(), "npu: an event of card ", int(card), " on ", stream);
    if (*event == nullptr) {
      *event = new Recorded;
    }
    static_cast<Recorded*>(*event)->when = std::chrono::steady_clock::now();
  }
  void block(void* event, const c10::Stream& stream) const override {
    checked_card(stream.device_index());
  }
  bool queryEvent(void*) const override {
    return true;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Recorded*>(event);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(card_count());
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex card) const override {
    checked_card(card < 0 ? current_card() : card);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr, "npu: both events must have been recorded");
    auto time = static_cast<Recorded*>(second)->when - static_cast<Recorded*>(first)->when;
    return std::chrono::duration<double, std::milli>(time).count();
  }

 private:
  struct Recorded {
    std::chrono::steady_clock::time_point when;
  };
  static c10::Stream made(c10::StreamId number, c10::Device device) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kCard, checked_card(index_of(device))), number);
  }
  static std::array<c10::StreamId, kMostCards>& current_stream() {
    static thread_local std::array<c10::StreamId, kMostCards> streams{};
    return streams;
  }
};

struct CardHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return card_count() > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(card_count());
  }
  void setCurrentDevice(c10::DeviceIndex card) const override {
    current_card() = checked_card(card);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_card();
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex card) const override {
    auto before = current_card();
    current_card() = checked_card(card);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex card) const override {
    return card < 0 ? current_card() : exchangeDevice(card);
  }
  bool isPinnedPtr(const void* address) const override {
    return PinnedAllocator::is_pinned(address);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex card) const override {
    return default_generator(card);
  }
  at::Generator getNewGenerator(c10::DeviceIndex card) const override {
    return at::make_generator<CardGenerator>(card < 0 ? current_card() : checked_card(card));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto memory = on_card(c10::GetCPUAllocator()->allocate(bytes), storage.device().index(), int64_t(bytes));
    const auto kept = std::min(bytes, storage.nbytes());
    if (kept != 0) {
      std::memcpy(memory.get(), storage.data(), kept);
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

}  // namespace rehearsal
