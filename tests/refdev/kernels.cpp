// Runs the kernels of the CPU in the device's streams.
//
// One fallback carries nearly all operations: shapes come from a call on "meta", and the CPU's kernel is queued.
// What has no shapes without its values (nonzero, for example) waits for the stream, as it does on other devices.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_foreach_norm_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/csrc/utils/torch_dispatch_mode.h>
#include <torch/library.h>

#include "device.h"

namespace refdev {

using at::Tensor;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

Tensor host_view(const Tensor& tensor) {
  const c10::Storage storage = tensor.storage();
  const auto offset = tensor.storage_offset() * int64_t(tensor.itemsize());
  char* bytes = storage.data() == nullptr ? nullptr : host_alias(storage.data()) + offset;
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  return at::from_blob(bytes, tensor.sizes(), tensor.strides(), [storage](void*) {}, options);
}

namespace {

bool is_ours(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDevice;
}

// The same value with each of its tensors exchanged.
template <class Exchange>
IValue exchanged(const IValue& value, const Exchange& exchange) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? IValue(exchange(value.toTensor())) : value;
  }
  if (value.isList()) {
    const auto list = value.toList();
    c10::impl::GenericList copy(list.elementType());
    for (const IValue& element : list) {
      copy.push_back(exchanged(element, exchange));
    }
    return copy;
  }
  return value;
}

template <class Visit>
void for_each_tensor(const IValue& value, const Visit& visit) {
  exchanged(value, [&visit](const Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}

bool is_generator(const c10::Argument& argument) {
  auto type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) {
    type = optional->getElementType();
  }
  return type->kind() == c10::TypeKind::GeneratorType;
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

Tensor shape_of(const Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    return tensor; // the result's dtype depends on that it is a number of Python's
  }
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

Tensor empty_like_shape(const Tensor& shape) {
  const auto device = c10::Device(kDevice, c10::DeviceIndex(current_device()));
  return at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(device));
}

// The device of a call's tensors. One of the CPU may be among them where it is a number, or holds indices.
int common_device(const OperatorHandle& operation, const Stack& arguments) {
  int device = -1;
  for (const IValue& argument : arguments) {
    if (argument.isDevice() && argument.toDevice().type() == kDevice && argument.toDevice().has_index()) {
      device = argument.toDevice().index();
    }
    for_each_tensor(argument, [&](const Tensor& tensor) {
      const bool fits = is_ours(tensor) ? device < 0 || device == tensor.device().index()
                                        : tensor.dim() == 0 || at::isIntegralType(tensor.scalar_type(), true);
      TORCH_CHECK(fits, "Expected all tensors to be on the same device, but got ", tensor.device(),
                  " beside another in ", operation.schema().name());
      if (is_ours(tensor)) {
        device = tensor.device().index();
      }
    });
  }
  return device < 0 ? current_device() : device;
}

// Hides what the device calls for itself from modes of Python: a dump would record it.
class WithoutModes {
 public:
  WithoutModes() { at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::ALL_DISABLED); }
  ~WithoutModes() { at::impl::PythonTorchFunctionTLS::set_disabled_state(before_); }

 private:
  at::impl::TorchFunctionDisabledState before_ = at::impl::PythonTorchFunctionTLS::get_disabled_state();
  torch::torch_dispatch_mode::StashTorchDispatchStackGuard stashed_;
};

// Calls the operation with the shapes alone. False where it cannot be known without the values.
bool infer_shapes(const OperatorHandle& operation, const Stack& arguments, Stack& shapes) {
  for (const IValue& argument : arguments) {
    const bool has_device = argument.isDevice() && argument.toDevice().type() == kDevice;
    shapes.push_back(has_device ? IValue(c10::Device(at::kMeta))
                                : argument.isGenerator() ? IValue() : exchanged(argument, shape_of));
  }
  const Stack written = shapes;
  try {
    const WithoutModes without_modes;
    operation.callBoxed(shapes);
  } catch (const std::exception&) {
    return false; // wrong arguments, too: then the CPU's kernel says so
  }
  for (const IValue& shape : shapes) {
    bool known = shape.isNone() || shape.isTensor() || shape.isTensorList();
    for_each_tensor(shape, [&known](const Tensor& tensor) { known = known && tensor.is_meta(); });
    if (!known) {
      return false;
    }
  }
  for (size_t index = 0; index < arguments.size(); index++) { // an output that was given may have got another size
    if (is_written(operation.schema().arguments()[index]) && arguments[index].isTensor()) {
      arguments[index].toTensor().resize_(written[index].toTensor().sizes());
    }
  }
  return true;
}

// The arguments as the CPU's kernel gets them. What the host may change after the call is copied.
Stack on_the_host(const OperatorHandle& operation, const Stack& arguments) {
  Stack converted;
  for (size_t index = 0; index < arguments.size(); index++) {
    const IValue& argument = arguments[index];
    if (is_generator(operation.schema().arguments()[index])) {
      const auto given = argument.isGenerator() ? std::make_optional(argument.toGenerator()) : std::nullopt;
      converted.emplace_back(at::make_generator<at::CPUGeneratorImpl>(draw_seed(given)));
    } else if (argument.isDevice()) {
      converted.emplace_back(c10::Device(at::kCPU));
    } else {
      converted.push_back(exchanged(argument, [](const Tensor& tensor) {
        return is_ours(tensor) ? host_view(tensor) : tensor.clone();
      }));
    }
  }
  return converted;
}

// The results of a call: an argument where the schema says that it is written, else what `make` makes.
template <class Make>
Stack results_of(const OperatorHandle& operation, const Stack& arguments, const Stack& templates, const Make& make) {
  const auto& schema = operation.schema();
  Stack results;
  size_t next_written = 0;
  for (size_t index = 0; index < templates.size(); index++) {
    const auto* alias_info = schema.returns()[index].alias_info();
    if (alias_info == nullptr) {
      results.push_back(exchanged(templates[index], make));
      continue;
    }
    TORCH_CHECK(alias_info->isWrite(), "refdev has no kernel for the view ", schema.name());
    while (!is_written(schema.arguments()[next_written])) {
      next_written++;
    }
    results.push_back(arguments[next_written++]);
  }
  return results;
}

// Pairs of what a kernel made on the CPU and where the device has it.
void copy_results(const Stack& made, const Stack& targets) {
  for (size_t index = 0; index < made.size(); index++) {
    std::vector<Tensor> sources;
    for_each_tensor(made[index], [&sources](const Tensor& tensor) { sources.push_back(tensor); });
    size_t next = 0;
    for_each_tensor(targets[index], [&](const Tensor& target) {
      const Tensor& source = sources.at(next++);
      if (source.data_ptr() != target.data_ptr()) {
        TORCH_CHECK(source.sizes() == target.sizes(), "a kernel made another shape than it had announced");
        target.copy_(source);
      }
    });
  }
}

void queue_kernel(const OperatorHandle& operation, const Stack& arguments, const Stack& results) {
  Stack targets;
  for (const IValue& result : results) {
    targets.push_back(exchanged(result, host_view));
  }
  launch(current_queue(), [operation, stack = on_the_host(operation, arguments), targets]() mutable {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    operation.callBoxed(stack);
    copy_results(stack, targets);
  });
}

// Waits for the values, and runs the kernel in this thread.
Stack run_at_once(const OperatorHandle& operation, const Stack& arguments) {
  count(kHostReads);
  Stack made = on_the_host(operation, arguments);
  synchronize(current_queue());
  operation.callBoxed(made);
  const Stack results = results_of(operation, arguments, made, [](const Tensor& tensor) {
    Tensor result = empty_like_shape(tensor);
    host_view(result).copy_(tensor);
    return result;
  });
  for (size_t index = 0; index < made.size(); index++) { // an output that was given may have got another size
    if (made[index].isTensor() && made[index].toTensor().sizes() != results[index].toTensor().sizes()) {
      results[index].toTensor().resize_(made[index].toTensor().sizes());
      host_view(results[index].toTensor()).copy_(made[index].toTensor());
    }
  }
  return results;
}

void call(const OperatorHandle& operation, Stack* stack) {
  const Stack arguments = torch::jit::pop(*stack, operation.schema().arguments().size());
  const int previous = exchange_device(common_device(operation, arguments));
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Stack shapes;
  Stack results;
  if (infer_shapes(operation, arguments, shapes)) {
    results = results_of(operation, arguments, shapes, empty_like_shape);
    queue_kernel(operation, arguments, results);
  } else {
    results = run_at_once(operation, arguments);
  }
  exchange_device(previous);
  stack->insert(stack->end(), results.begin(), results.end());
}

OperatorHandle operation_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

void convolution(const OperatorHandle&, Stack* stack) {
  static const auto operation = operation_named("aten::convolution");
  call(operation, stack);
}

void convolution_backward(const OperatorHandle&, Stack* stack) {
  static const auto operation = operation_named("aten::convolution_backward");
  const int64_t channels = torch::jit::peek(*stack, 0, 10).toTensor().size(1);
  stack->insert(stack->end() - 7, IValue(std::vector<int64_t>{channels})); // the sizes of the bias
  call(operation, stack);
}

// A layer norm's mean and deviation are float32, as on other devices: the CPU has them in the precision of its input.
void layer_norm(const OperatorHandle& operation, Stack* stack) {
  const size_t number = operation.schema().arguments().size();
  const Tensor input = torch::jit::peek(*stack, 0, number).toTensor();
  if (!at::isReducedFloatingType(input.scalar_type())) {
    return call(operation, stack);
  }
  for (IValue& argument : torch::jit::last(*stack, number).vec()) {
    stack->push_back(exchanged(argument, [](const Tensor& tensor) { return tensor.to(at::kFloat); }));
  }
  stack->erase(stack->end() - 2 * int64_t(number), stack->end() - int64_t(number));
  call(operation, stack);
  const size_t statistics = operation.schema().name() == "aten::native_layer_norm" ? 2 : 0;
  for (size_t index = stack->size() - 3; index < stack->size() - statistics; index++) {
    IValue& result = (*stack)[index];
    result = exchanged(result, [&input](const Tensor& tensor) { return tensor.to(input.scalar_type()); });
  }
}

// Memory, views and copies

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), device_allocator(), keys,
                                   at::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           device_allocator(), keys, at::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  const auto size = C10_AS_INTARRAYREF_SLOW(sizes);
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() == size) {
    return self;
  }
  impl->set_sizes_contiguous(size);
  if (format) {
    impl->empty_tensor_restride(*format);
  }
  const size_t bytes = (self.storage_offset() + self.numel()) * self.itemsize();
  if (bytes > self.storage().nbytes()) {
    resize_storage(self.storage(), bytes);
  }
  return self;
}

Tensor& set_source(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef sizes,
                   c10::SymIntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.expect_int());
  if (strides.empty() && !sizes.empty()) {
    impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(sizes));
  } else {
    impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
  }
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  const bool to_host = !is_ours(target);
  const bool from_host = !is_ours(self);
  const Tensor& device_side = to_host ? self : target;
  const int previous = exchange_device(device_side.device().index());
  if (!to_host && !from_host && self.device() != target.device()) {
    synchronize_device(self.device().index());
  }
  if (to_host || from_host) {
    count(to_host ? kCopiesToHost : kCopiesToDevice);
  }
  const Tensor& host_side = to_host ? target : self;
  const bool waits = (to_host || from_host) && !(non_blocking && host_side.is_pinned());
  const Tensor source = from_host ? self : host_view(self);
  const Tensor destination = to_host ? target : host_view(target);
  // Pageable memory is read before the call returns, and the host waits until the device has it.
  const Tensor read = from_host && waits ? source.clone() : source.detach();
  launch(current_queue(), [read, destination = destination.detach()] {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    destination.copy_(read);
  });
  if (waits) {
    synchronize(current_queue());
  }
  exchange_device(previous);
  return target;
}

at::Scalar local_scalar_dense(const Tensor& self) {
  count(kHostReads);
  synchronize(stream(self.device().index(), current_stream(self.device().index())));
  return host_view(self).item();
}

void record_stream(Tensor&, c10::Stream) {} // each queued task holds the storages it needs

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double probability, std::optional<bool> train) {
  if (!train.value_or(true) || probability == 0) {
    return {input.clone(), at::ones_like(input, at::kBool)};
  }
  const Tensor mask = at::empty_like(input, at::kBool).bernoulli_(1 - probability);
  const double scale = probability == 1 ? 0 : 1 / (1 - probability);
  return {input * mask * scale, mask};
}

// As CUDA's, which has no infinity norm of a tensor without elements.
std::vector<Tensor> foreach_norm(at::TensorList tensors, const at::Scalar& order, std::optional<at::ScalarType> dtype) {
  for (const Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.numel() > 0 || !std::isinf(order.toDouble()),
                "_foreach_norm cannot compute the infinity norm on an empty tensor because the operation does not "
                "have an identity");
  }
  return at::native::foreach_tensor_norm_slow(tensors, order, dtype);
}

} // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&call>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", set_source);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", native_dropout);
  m.impl("_foreach_norm.Scalar", foreach_norm);
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&layer_norm>());
  m.impl("native_layer_norm_backward", torch::CppFunction::makeFromBoxedFunction<&layer_norm>());
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
#define FULL_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(FULL_PRECISION)
#define FULL_PRECISION_UNLESS_NAMED(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(FULL_PRECISION_UNLESS_NAMED)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(WIDEST)
}

} // namespace refdev
