// Memory of the rehearsal device: host memory, tagged with a card and counted.
#pragma once

#include <atomic>
#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_set>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

namespace rehearsal {

constexpr auto kCard = c10::DeviceType::PrivateUse1;
constexpr int kMostCards = 16;

// The number of cards that this process may use, of HP_REHEARSAL_DEVICES.
inline int card_count() {
  static const int count = [] {
    const char* text = std::getenv("HP_REHEARSAL_DEVICES");
    int number = text == nullptr ? 1 : std::atoi(text);
    return number < 0 ? 0 : number > kMostCards ? kMostCards : number;
  }();
  return count;
}

// The card on which this thread makes new tensors.
inline c10::DeviceIndex& current_card() {
  static thread_local c10::DeviceIndex card = 0;
  return card;
}

inline c10::DeviceIndex checked_card(c10::DeviceIndex card) {
  TORCH_CHECK(card >= 0 && card < card_count(), "npu: no card ", int(card), "; this process has ", card_count());
  return card;
}

// Bytes in use, their peak, and how many may be in use (0: any number), of one card.
struct Usage {
  std::mutex mutex;
  int64_t bytes = 0;
  int64_t peak = 0;
  int64_t limit = 0;
};

inline Usage& usage_of(c10::DeviceIndex card) {
  static std::array<Usage, kMostCards> all;
  return all[checked_card(card)];
}

inline void take(c10::DeviceIndex card, int64_t bytes) {
  Usage& usage = usage_of(card);
  std::lock_guard<std::mutex> lock(usage.mutex);
  TORCH_CHECK_WITH(
      OutOfMemoryError,
      usage.limit == 0 || usage.bytes + bytes <= usage.limit,
      "npu:", int(card), " is out of memory: ", bytes, " bytes were asked for, ", usage.bytes, " of ", usage.limit,
      " are in use");
  usage.bytes += bytes;
  if (usage.bytes > usage.peak) {
    usage.peak = usage.bytes;
  }
}

inline void give_back(c10::DeviceIndex card, int64_t bytes) {
  Usage& usage = usage_of(card);
  std::lock_guard<std::mutex> lock(usage.mutex);
  usage.bytes -= bytes;
}

// What keeps a piece of a card's memory: host memory, counted on the card until it is freed.
struct Block {
  Block(c10::DataPtr memory, c10::DeviceIndex card, int64_t bytes) : memory(std::move(memory)), card(card), bytes(bytes) {
    take(card, bytes);
  }
  ~Block() {
    give_back(card, bytes);
  }
  c10::DataPtr memory;
  c10::DeviceIndex card;
  int64_t bytes;
};

inline void free_block(void* block) {
  delete static_cast<Block*>(block);
}

// Host memory as memory of a card.
inline c10::DataPtr on_card(c10::DataPtr memory, c10::DeviceIndex card, int64_t bytes) {
  void* address = memory.get();
  c10::Device device(kCard, card);
  if (address == nullptr) {
    return {nullptr, device};
  }
  auto block = std::make_unique<Block>(std::move(memory), card, bytes);
  return {address, block.release(), &free_block, device};
}

class CardAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto card = checked_card(current_card());
    if (bytes == 0) {
      return {nullptr, c10::Device(kCard, card)};
    }
    return on_card(c10::GetCPUAllocator()->allocate(bytes), card, static_cast<int64_t>(bytes));
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;  // the address alone does not tell its block
  }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    std::memcpy(to, from, count);
  }
};

inline CardAllocator* card_allocator() {
  static CardAllocator allocator;
  return &allocator;
}

// Host memory from which a card could copy without waiting; every address is remembered while it is in use.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto memory = c10::GetCPUAllocator()->allocate(bytes);
    void* address = memory.get();
    if (address == nullptr) {
      return memory;
    }
    {
      std::lock_guard<std::mutex> lock(mutex());
      addresses().insert(address);
    }
    return {address, new c10::DataPtr(std::move(memory)), &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    std::memcpy(to, from, count);
  }
  static bool is_pinned(const void* address) {
    std::lock_guard<std::mutex> lock(mutex());
    return addresses().count(address) != 0;
  }

 private:
  static void release(void* held) {
    auto* memory = static_cast<c10::DataPtr*>(held);
    {
      std::lock_guard<std::mutex> lock(mutex());
      addresses().erase(memory->get());
    }
    delete memory;
  }
  static std::mutex& mutex() {
    static std::mutex lock;
    return lock;
  }
  static std::unordered_set<const void*>& addresses() {
    static std::unordered_set<const void*> all;
    return all;
  }
};

inline PinnedAllocator* pinned_allocator() {
  static PinnedAllocator allocator;
  return &allocator;
}

}  // namespace rehearsal
