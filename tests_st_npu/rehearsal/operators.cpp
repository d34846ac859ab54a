// A device that is not the CPU but computes on it: PyTorch's "PrivateUse1", the mechanism of torch_npu. See README.md.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "host_call.h"

namespace rehearsal {
namespace {

// Operators whose index tensors may lie on the host, as on every accelerator.
bool may_index_from_host(const std::string& name) {
  return name == "aten::index" || name == "aten::index_put_" || name == "aten::index_put" ||
      name == "aten::_index_put_impl_" || name == "aten::_unsafe_index" || name == "aten::_unsafe_index_put";
}

// The operands of one boxed call: looks at each tensor, and replaces it.
struct Operands {
  const c10::OperatorHandle& op;
  HostCall call;
  bool writes_host = false;
  std::vector<c10::Device> others;

  void see(const at::Tensor& tensor, bool written) {
    if (!tensor.defined()) {
      return;
    }
    if (tensor.device().type() == kCard) {
      if (call.card < 0) {
        call.card = tensor.device().index();
      }
      if (tensor.device().index() != call.card) {
        others.push_back(tensor.device());
      }
    } else if (tensor.dim() != 0 || written) {
      others.push_back(tensor.device());
    }
  }

  void check() const {
    const auto& name = op.schema().name();
    if (others.empty() || call.card < 0 || (may_index_from_host(name) && others[0].is_cpu())) {
      return;
    }
    TORCH_CHECK(
        false, name, ": expected all tensors to be on one device, but there are npu:", int(call.card), " and ",
        others[0]);
  }
};

template <typename Visit>
void each_tensor(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor tensor : value.toTensorList()) {
      visit(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
      if (tensor.has_value()) {
        visit(*tensor);
      }
    }
  }
}

c10::IValue host_value(const c10::IValue& value, const c10::Argument& argument, HostCall& call) {
  if (value.isTensor()) {
    return call.host(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> hosts;
    each_tensor(value, [&](const at::Tensor& tensor) { hosts.push_back(call.host(tensor)); });
    return hosts;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> hosts;
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
      hosts.push_back(tensor.has_value() ? std::make_optional(call.host(*tensor)) : std::nullopt);
    }
    return hosts;
  }
  if (value.isStorage()) {
    return value.toStorage().device().type() == kCard ? call.host_storage(value.toStorage()) : value.toStorage();
  }
  if (value.isDevice() && value.toDevice().type() == kCard) {
    return c10::Device(c10::DeviceType::CPU);
  }
  if (value.isGenerator()) {
    auto generator = value.toGenerator();
    TORCH_CHECK(
        generator.device().type() == kCard, "expected a generator of npu:", int(call.card), ", not of ",
        generator.device());
    return host_generator(generator);
  }
  if (value.isNone() && argument.type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()))) {
    return host_generator(default_generator(call.card));
  }
  return value;
}

c10::IValue card_value(const c10::IValue& value, HostCall& call) {
  if (value.isTensor()) {
    return call.result(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> results;
    each_tensor(value, [&](const at::Tensor& tensor) { results.push_back(call.result(tensor)); });
    return results;
  }
  return value;
}

// While it lives, the host's default generator draws the numbers of the card's: for operators that take none.
class BorrowedGenerator {
 public:
  BorrowedGenerator(const c10::OperatorHandle& op, c10::DeviceIndex card) : card_(card) {
    if (!op.hasTag(at::Tag::nondeterministic_seeded)) {
      return;
    }
    for (const auto& argument : op.schema().arguments()) {
      if (argument.type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()))) {
        return;
      }
    }
    state_ = at::detail::getDefaultCPUGenerator().get_state();
    auto generator = at::detail::getDefaultCPUGenerator();
    generator.set_state(host_generator(default_generator(card)).get_state());
  }
  ~BorrowedGenerator() {
    if (state_.defined()) {
      auto generator = at::detail::getDefaultCPUGenerator();
      host_generator(default_generator(card_)).set_state(generator.get_state());
      generator.set_state(state_);
    }
  }

 private:
  c10::DeviceIndex card_;
  at::Tensor state_;
};

// Every operator without a kernel of its own: refuses operands of two devices, then computes on the host.
void on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto first = stack->size() - arguments.size();
  Operands operands{op, {}};
  for (size_t place = 0; place < arguments.size(); ++place) {
    const bool written = arguments[place].alias_info() != nullptr && arguments[place].alias_info()->isWrite();
    const auto& value = (*stack)[first + place];
    each_tensor(value, [&](const at::Tensor& tensor) { operands.see(tensor, written); });
    if (operands.call.card < 0 && value.isDevice() && value.toDevice().type() == kCard) {
      operands.call.card = index_of(value.toDevice());
    }
  }
  operands.check();
  auto& call = operands.call;
  if (call.card < 0) {
    call.card = current_card();
  }
  for (size_t place = 0; place < arguments.size(); ++place) {
    (*stack)[first + place] = host_value((*stack)[first + place], arguments[place], call);
  }
  {
    BorrowedGenerator borrowed(op, call.card);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  call.update_operands();
  for (auto value = stack->end() - op.schema().returns().size(); value != stack->end(); ++value) {
    *value = card_value(*value, call);
  }
}

void check_factory(std::optional<bool> pin_memory, std::optional<c10::Layout> layout) {
  TORCH_CHECK(!pin_memory.value_or(false), "only tensors of the CPU can be pinned, not those of npu");
  TORCH_CHECK(layout.value_or(c10::kStrided) == c10::kStrided, "npu: only strided tensors, not ", *layout);
}

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> pin_memory, std::optional<c10::MemoryFormat> format) {
  check_factory(pin_memory, layout);
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), card_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<c10::Layout> layout, std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  check_factory(pin_memory, layout);
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), card_allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// Every copy from or to the card comes here.
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  HostCall from, to;
  to.host(target).copy_(from.host(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Tensor convolve(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
    int64_t groups) {
  HostCall call;
  auto host_bias = bias.has_value() && bias->defined() ? std::make_optional(call.host(*bias)) : std::nullopt;
  auto host_input = call.host(input);
  return call.result(at::convolution(
      host_input, call.host(weight), host_bias, stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolve_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> mask) {
  HostCall call;
  auto host_gradient = call.host(gradient);
  // The bias has one element per channel of the output.
  std::vector<int64_t> bias_sizes{gradient.size(1)};
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      host_gradient, call.host(input), call.host(weight), at::OptionalIntArrayRef(bias_sizes), stride, padding, dilation,
      transposed, output_padding, groups, mask);
  return {call.result(of_input), call.result(of_weight), call.result(of_bias)};
}

int64_t memory(int64_t card, bool peak) {
  Usage& usage = usage_of(static_cast<c10::DeviceIndex>(card));
  std::lock_guard<std::mutex> lock(usage.mutex);
  return peak ? usage.peak : usage.bytes;
}

void reset_peak(int64_t card) {
  Usage& usage = usage_of(static_cast<c10::DeviceIndex>(card));
  std::lock_guard<std::mutex> lock(usage.mutex);
  usage.peak = usage.bytes;
}

void limit_memory(int64_t card, int64_t bytes) {
  Usage& usage = usage_of(static_cast<c10::DeviceIndex>(card));
  std::lock_guard<std::mutex> lock(usage.mutex);
  usage.limit = bytes;
}

at::Generator default_generator_of(int64_t card) {
  return default_generator(static_cast<c10::DeviceIndex>(card));
}

CardHooks hooks;
const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(kCard, card_allocator());
  return true;
}();

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, CardGuard);

TORCH_LIBRARY(rehearsal, library) {
  library.def("memory(int card, bool peak) -> int", &memory);
  library.def("reset_peak(int card) -> ()", &reset_peak);
  library.def("limit_memory(int card, int bytes) -> ()", &limit_memory);
  library.def("default_generator(int card) -> Generator?", &default_generator_of);
}

// Work is complete when a call returns, so memory may be reused at once.
void record_stream(at::Tensor& tensor, c10::Stream stream) {}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("record_stream", &record_stream);
  library.impl("convolution_overrideable", &convolve);
  library.impl("convolution_backward_overrideable", &convolve_backward);
}

// Copies themselves see to lazy conjugation and negation; resolved before, each would begin with a copy, and so on.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace rehearsal
