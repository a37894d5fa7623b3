// Every operator of the rig's device: checked as CUDA checks, then computed by the CPU's kernel on
// the same memory. What an operator returns, writes into or resizes is the device's again.
#include "rig.h"

#include <ATen/EmptyTensor.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/ops/copy_ops.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <unordered_map>
#include <unordered_set>

namespace at::autocast {
// ATen/autocast_mode.h declares it too, beside every operator.
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device);
} // namespace at::autocast

namespace rig {

static c10::DispatchKeySet keys(const at::Tensor& like, c10::DispatchKey backend) {
  const auto bits = c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  return c10::DispatchKeySet(backend) | (like.key_set() & bits);
}

static at::Tensor tensor_over(
    c10::Storage storage, const at::Tensor& like, c10::DispatchKey backend) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), keys(like, backend), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  return made;
}

static c10::Storage host_storage(const c10::Storage& device) {
  auto* held = new c10::Storage(device);
  c10::DataPtr data(
      device.mutable_data(), held, [](void* p) { delete static_cast<c10::Storage*>(p); },
      c10::Device(c10::DeviceType::CPU));
  return c10::Storage(
      c10::Storage::use_byte_size_t(), device.nbytes(), std::move(data), c10::GetCPUAllocator(),
      true);
}

at::Tensor on_host(const at::Tensor& tensor) {
  return tensor_over(host_storage(tensor.storage()), tensor, c10::DispatchKey::CPU);
}

// One call's tensors of the device, each with its double on the CPU.
class Doubles {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != KIND) {
      return tensor;
    }
    const auto known = by_tensor_.find(tensor.unsafeGetTensorImpl());
    if (known != by_tensor_.end()) {
      return pairs_[known->second].second;
    }
    const auto& storage = tensor.storage();
    auto found = by_storage_.find(storage.unsafeGetStorageImpl());
    if (found == by_storage_.end()) {
      found = by_storage_.emplace(storage.unsafeGetStorageImpl(), storages_.size()).first;
      storages_.emplace_back(storage, host_storage(storage));
      by_host_storage_[storages_.back().second.unsafeGetStorageImpl()] = found->second;
    }
    auto made = tensor_over(storages_[found->second].second, tensor, c10::DispatchKey::CPU);
    by_tensor_[tensor.unsafeGetTensorImpl()] = pairs_.size();
    by_host_[made.unsafeGetTensorImpl()] = pairs_.size();
    pairs_.emplace_back(tensor, made);
    return made;
  }

  // An operator may have given an argument other memory or another shape.
  void follow(c10::DeviceIndex device) {
    for (auto& [own, host] : storages_) {
      if (own.data() != host.data() || own.nbytes() != host.nbytes()) {
        own.set_data_ptr_noswap(as_device_memory(host, device));
        own.set_nbytes(host.nbytes());
      }
    }
    for (auto& [own, host] : pairs_) {
      auto* impl = own.unsafeGetTensorImpl();
      const auto& known = storages_[by_storage_.at(own.storage().unsafeGetStorageImpl())].second;
      if (host.storage().unsafeGetStorageImpl() != known.unsafeGetStorageImpl()) {
        impl->set_storage_keep_dtype(device_storage(host.storage(), device));
      }
      if (own.sizes() != host.sizes() || own.strides() != host.strides() ||
          own.storage_offset() != host.storage_offset()) {
        impl->set_storage_offset(host.storage_offset());
        impl->set_sizes_and_strides(host.sizes(), host.strides());
      }
    }
  }

  at::Tensor back(const at::Tensor& result, c10::DeviceIndex device) {
    if (!result.defined() || result.device().type() != c10::DeviceType::CPU) {
      return result;
    }
    const auto same = by_host_.find(result.unsafeGetTensorImpl());
    if (same != by_host_.end()) {
      return pairs_[same->second].first;
    }
    return tensor_over(
        device_storage(result.storage(), device), result, c10::DispatchKey::PrivateUse1);
  }

 private:
  c10::Storage device_storage(const c10::Storage& host, c10::DeviceIndex device) {
    const auto known = by_host_storage_.find(host.unsafeGetStorageImpl());
    if (known != by_host_storage_.end()) {
      return storages_[known->second].first;
    }
    auto made = as_device_storage(host, device);
    by_host_storage_[host.unsafeGetStorageImpl()] = storages_.size();
    storages_.emplace_back(made, host);
    return made;
  }

  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;
  std::unordered_map<void*, size_t> by_tensor_, by_host_, by_storage_, by_host_storage_;
};

// --- what CUDA would refuse ---------------------------------------------------------------------

static const std::unordered_set<std::string>& indexing() {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_",
      "aten::_unsafe_index_put", "aten::_index_put_impl_"};
  return *names;
}

static bool takes_numbers(const c10::OperatorHandle& op) {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::masked_fill", "aten::masked_fill_", "aten::fill_", "aten::index_fill",
      "aten::index_fill_", "aten::where", "aten::clamp", "aten::clamp_", "aten::floor_divide",
      "aten::floor_divide_"};
  const auto& name = op.schema().name();
  return op.hasTag(at::Tag::pointwise) || name.rfind("aten::_foreach", 0) == 0 ||
      names->count(name) || indexing().count(name);
}

static bool multiplies_matrices(const std::string& name) {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::baddbmm_",
      "aten::mv", "aten::addmv", "aten::addmv_", "aten::dot"};
  return names->count(name);
}

// Finds the device of a call and refuses what a device with memory of its own cannot do.
class Check {
 public:
  explicit Check(const c10::OperatorHandle& op) : op_(op) {}

  void see(const at::Tensor& tensor, bool is_index) {
    if (!tensor.defined()) {
      return;
    }
    if (tensor.device().type() != KIND) {
      const bool number = tensor.unsafeGetTensorImpl()->is_wrapped_number() ||
          (tensor.dim() == 0 && takes_numbers(op_));
      if (!number && !is_index && !strange_) {
        strange_ = tensor.device();
      }
      return;
    }
    if (device_ && *device_ != tensor.device()) {
      strange_ = tensor.device();
    }
    device_ = device_.value_or(tensor.device());
    if (multiplies_matrices(op_.schema().name()) && at::isIntegralType(tensor.scalar_type(), true)) {
      TORCH_CHECK_NOT_IMPLEMENTED(
          false, "\"", op_.schema().name(), "\" not implemented for '", tensor.scalar_type(), "'");
    }
  }

  void see(c10::Device device) {
    if (device.type() == KIND && !device_) {
      device_ = c10::Device(KIND, device.has_index() ? device.index() : current_device());
    }
  }

  c10::DeviceIndex device() const {
    TORCH_INTERNAL_ASSERT(device_, op_.schema().name(), " came to the rig without its device");
    TORCH_CHECK(
        !strange_, "Expected all tensors to be on the same device, but found at least two devices, ",
        *device_, " and ", strange_.value_or(*device_), "! (", op_.schema().name(), ")");
    return device_->index();
  }

 private:
  const c10::OperatorHandle& op_;
  std::optional<c10::Device> device_, strange_;
};

static c10::DeviceIndex checked(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  Check check(op);
  const auto& arguments = op.schema().arguments();
  const auto first = stack.size() - arguments.size();
  // The tensors that index may lie on the CPU, if what they index does not.
  const bool indexes = indexing().count(op.schema().name()) && stack[first].isTensor() &&
      stack[first].toTensor().device().type() == KIND;
  const bool copies = op.schema().name() == "aten::_foreach_copy_";
  for (size_t place = 0; place < arguments.size(); place++) {
    const auto& value = stack[first + place];
    if (value.isTensor()) {
      check.see(value.toTensor(), false);
    } else if (value.isTensorList()) {
      for (const auto& each : value.toTensorVector()) {
        check.see(each, copies && place == 1);
      }
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& each : value.toOptionalTensorList()) {
        check.see(each.value_or(at::Tensor()), indexes);
      }
    } else if (value.isDevice()) {
      check.see(value.toDevice());
    }
  }
  return check.device();
}

// --- random numbers -----------------------------------------------------------------------------

// Operators without a generator of their own draw from the CPU's default one: lend it ours.
class LentNumbers {
 public:
  LentNumbers(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::DeviceIndex device) {
    const auto& arguments = op.schema().arguments();
    const auto first = stack->size() - arguments.size();
    for (size_t place = 0; place < arguments.size(); place++) {
      auto& value = (*stack)[first + place];
      if (value.isGenerator()) {
        value = at::detail::createCPUGenerator(next_draw(value.toGenerator()));
        return;
      }
    }
    if (op.hasTag(at::Tag::nondeterministic_seeded)) {
      held_ = at::detail::getDefaultCPUGenerator();
      before_ = held_.get_state();
      held_.set_current_seed(next_draw(device));
    }
  }
  ~LentNumbers() {
    if (before_.defined()) {
      held_.set_state(before_);
    }
  }

 private:
  at::Generator held_;
  at::Tensor before_;
};

// --- operators ----------------------------------------------------------------------------------

static void exchange(c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& with) {
  if (value.isTensor()) {
    value = with(value.toTensor());
  } else if (value.isTensorList()) {
    auto list = value.toTensorVector();
    for (auto& each : list) {
      each = with(each);
    }
    value = c10::IValue(std::move(list));
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorList()) {
      list.push_back(each ? std::optional<at::Tensor>(with(*each)) : std::nullopt);
    }
    value = c10::IValue(std::move(list));
  } else if (value.isDevice() && value.toDevice().type() == KIND) {
    value = c10::Device(c10::DeviceType::CPU);
  }
}

static void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto device = checked(op, *stack);
  const auto count = op.schema().arguments().size();
  Doubles doubles;
  for (size_t place = stack->size() - count; place < stack->size(); place++) {
    exchange((*stack)[place], [&](const at::Tensor& each) { return doubles.of(each); });
  }
  {
    LentNumbers lent(op, stack, device);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  doubles.follow(device);
  const auto results = op.schema().returns().size();
  for (size_t place = stack->size() - results; place < stack->size(); place++) {
    exchange((*stack)[place], [&](const at::Tensor& each) { return doubles.back(each, device); });
  }
}

class OnDevice {
 public:
  explicit OnDevice(std::optional<c10::Device> device) : before_(current_device()) {
    if (device && device->has_index()) {
      set_current_device(device->index());
    }
  }
  ~OnDevice() {
    set_current_device(before_);
  }

 private:
  c10::DeviceIndex before_;
};

static at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool> pin_memory,
    std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice on(device);
  return at::detail::empty_generic(
      size, c10::GetAllocator(KIND), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

static at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice on(device);
  return at::detail::empty_strided_generic(
      size, stride, c10::GetAllocator(KIND), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

static at::Tensor any_on_host(const at::Tensor& tensor) {
  return tensor.device().type() == KIND ? on_host(tensor) : tensor;
}

// A copy is the one way from a device to another or to the host.
static at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  auto target = any_on_host(to);
  at::_ops::copy_::call(target, any_on_host(from), false);
  return to;
}

static at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  TORCH_CHECK(from.sizes() == to.sizes(), "rig: a copy that resizes is not known");
  return copy_from(from, to, false);
}

static at::Tensor& set_part(
    at::Tensor& tensor, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  TORCH_CHECK(storage.device_type() == KIND, "Attempted to set the storage of a tensor on device \"",
      tensor.device(), "\" to a storage on different device \"", storage.device(), "\"");
  auto* impl = tensor.unsafeGetTensorImpl();
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  if (stride.data() == nullptr) {
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride));
  }
  return tensor;
}

static at::Tensor& set_whole(at::Tensor& tensor, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
  return set_part(tensor, std::move(storage), 0, {c10::SymInt(count)}, {});
}

static void record_stream(at::Tensor&, c10::Stream) {}

// Under autocast products of matrices are computed in fewer bits; all else as it comes.
static void lower(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKey::AutocastPrivateUse1);
  const auto dtype = at::autocast::get_autocast_dtype(KIND);
  const auto count = op.schema().arguments().size();
  for (size_t place = stack->size() - count; place < stack->size(); place++) {
    exchange((*stack)[place], [&](const at::Tensor& each) {
      const bool lowers = each.defined() && each.scalar_type() == at::kFloat;
      return lowers ? each.to(dtype) : each;
    });
  }
  op.callBoxed(stack);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const auto* name : {"matmul", "linear", "mm", "addmm", "bmm", "baddbmm",
                           "scaled_dot_product_attention"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&lower>());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("set_.source_Storage", TORCH_FN(set_whole));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_part));
  m.impl("record_stream", TORCH_FN(record_stream));
  // On a device without a kernel of its own, torch computes these by other formulas than on the
  // CPU, which differ by one rounding.
  for (const auto* name : {"silu_backward", "mish_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&compute>());
  }
}

} // namespace rig
