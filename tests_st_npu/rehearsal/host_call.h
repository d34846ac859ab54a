// Runs an operator of the rehearsal device on the host: the same memory seen as host tensors, no copies.
#pragma once

#include <unordered_map>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include "card.h"

namespace rehearsal {

inline bool is_card(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kCard;
}

// One call: which host tensor stands for which tensor of the card, and the other way round for results.
class HostCall {
 public:
  // The card of the operands; -1 before any was seen.
  c10::DeviceIndex card = -1;

  // The same memory as a host tensor; host tensors are themselves.
  at::Tensor host(const at::Tensor& tensor) {
    if (!is_card(tensor)) {
      return tensor;
    }
    auto seen = hosts_.find(tensor.unsafeGetTensorImpl());
    if (seen != hosts_.end()) {
      return seen->second;
    }
    if (card < 0) {
      card = tensor.device().index();
    }
    auto made = tensor_over(host_storage(tensor.storage()), c10::DispatchKey::CPU, tensor);
    hosts_.emplace(tensor.unsafeGetTensorImpl(), made);
    cards_.emplace(made.unsafeGetTensorImpl(), tensor);
    return made;
  }

  // A host storage over the memory of a card's.
  c10::Storage host_storage(const c10::Storage& storage) {
    auto seen = storages_.find(storage.unsafeGetStorageImpl());
    if (seen != storages_.end()) {
      return seen->second.first;
    }
    auto* kept = new c10::Storage(storage);
    c10::DataPtr memory(storage.mutable_data(), kept, &free_storage, c10::Device(c10::DeviceType::CPU));
    c10::Storage made(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(memory), c10::GetCPUAllocator(), true);
    storages_.emplace(storage.unsafeGetStorageImpl(), std::make_pair(made, storage));
    origins_.emplace(made.unsafeGetStorageImpl(), storage);
    return made;
  }

  // A result of the host as a tensor of the card: an operand itself, a view of one, or the result's own memory.
  at::Tensor result(const at::Tensor& host) {
    if (!host.defined()) {
      return host;
    }
    auto operand = cards_.find(host.unsafeGetTensorImpl());
    return operand != cards_.end() ? operand->second
                                   : tensor_over(card_storage(host.storage()), c10::DispatchKey::PrivateUse1, host);
  }

  // Carry over to the operands what the host changed about their memory, sizes and strides.
  void update_operands() {
    for (auto& [impl, storages] : storages_) {
      const auto& [host, of_card] = storages;
      if (host.data() != of_card.data() || host.nbytes() != of_card.nbytes()) {
        adopt(host, of_card);
      }
    }
    for (auto& [impl, of_card] : cards_) {
      if (!of_card.storage().is_alias_of(card_storage(impl->storage()))) {
        of_card.unsafeGetTensorImpl()->set_storage_keep_dtype(card_storage(impl->storage()));
      }
      if (of_card.sizes() != impl->sizes() || of_card.strides() != impl->strides() ||
          of_card.storage_offset() != impl->storage_offset()) {
        of_card.unsafeGetTensorImpl()->set_sizes_and_strides(impl->sizes(), impl->strides(), impl->storage_offset());
      }
    }
  }

 private:
  static void free_storage(void* kept) {
    delete static_cast<c10::Storage*>(kept);
  }

  static at::Tensor tensor_over(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
    auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    made._set_conj(like.is_conj());
    made._set_neg(like.is_neg());
    return made;
  }

  // Memory that the host allocated, moved to the card: what the host tensor had is not its own any more.
  void adopt(const c10::Storage& host, const c10::Storage& of_card) {
    auto* kept = new c10::Storage(host);
    c10::DataPtr memory(host.mutable_data(), kept, &free_storage, c10::Device(c10::DeviceType::CPU));
    const auto bytes = host.nbytes();
    auto* impl = of_card.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(on_card(std::move(memory), of_card.device().index(), static_cast<int64_t>(bytes)));
    impl->set_nbytes(bytes);
  }

  c10::Storage card_storage(const c10::Storage& host) {
    auto seen = origins_.find(host.unsafeGetStorageImpl());
    if (seen != origins_.end()) {
      return seen->second;
    }
    c10::Storage made(
        c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, c10::Device(kCard, card)), card_allocator(), true);
    adopt(host, made);
    origins_.emplace(host.unsafeGetStorageImpl(), made);
    fresh_.push_back(host);  // its address stays its own while this call lasts
    return made;
  }

  std::unordered_map<c10::TensorImpl*, at::Tensor> hosts_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> cards_;
  std::unordered_map<c10::StorageImpl*, std::pair<c10::Storage, c10::Storage>> storages_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> origins_;
  std::vector<c10::Storage> fresh_;
};

}  // namespace rehearsal
