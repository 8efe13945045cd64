// How does every other operator run?  Its CPU kernel runs in the current stream, on the bytes in device memory.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>

#include "device.h"

namespace sim {
namespace {
using Values = std::vector<c10::IValue>;
using Change = std::function<at::Tensor(const at::Tensor&)>;

// ---------------------------------------------------------------- tensors inside arguments
c10::IValue changed(const c10::IValue& value, const Change& change) {
  auto one = [&](const at::Tensor& tensor) { return tensor.defined() ? change(tensor) : tensor; };
  if (value.isTensor()) return one(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& tensor : value.toTensorList()) out.push_back(one(tensor));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
      out.push_back(tensor ? std::optional<at::Tensor>(one(*tensor)) : std::nullopt);
    return out;
  }
  return value;
}
at::Tensor numbered_like(at::Tensor out, const at::Tensor& like) {
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) out.unsafeGetTensorImpl()->set_wrapped_number(true);
  return out;
}
// A number on the host stays there: meta kernels written in Python refuse one that is on the meta device.
at::Tensor as_meta(const at::Tensor& tensor) {
  if (tensor.device().is_cpu() && !tensor.dim()) return numbered_like(tensor.detach().clone(), tensor);
  auto options = tensor.options().device(c10::kMeta);
  return numbered_like(at::empty_strided(tensor.sizes(), tensor.strides(), options), tensor);
}
// What is on the host has the value of the time of the call.
at::Tensor as_kernel_sees(const at::Tensor& tensor) {
  return on_device(tensor) ? kernel_view(tensor) : numbered_like(tensor.detach().clone(), tensor);
}

// Kernels for other devices warn of what they are not asked for here, in the wrong thread or twice.
struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};
Silent g_silent;

// ---------------------------------------------------------------- one call of an operator
class Call {
 public:
  Call(const c10::OperatorHandle& op, Values given)
      : op_(op), schema_(op.schema()), given_(std::move(given)), device_(device_used()), stream_(current(device_)) {
    for (const auto& result : schema_.returns())
      TORCH_CHECK_NOT_IMPLEMENTED(!result.alias_info() || result.alias_info()->isWrite(), "simulated device: ",
                                  schema_.name(), " returns a view, so it needs code of its own");
  }

  Values run() {
    c10::DeviceGuard guard(c10::Device(type(), c10::DeviceIndex(device_)));
    if (shapes_known()) return run_in_stream();
    return run_now();
  }

 private:
  const c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  Values given_;
  int device_;
  Stream* stream_;
  Values metas_, shapes_;

  // The device of the first tensor on one, else the device that an argument names, else the current one.
  int device_used() const {
    int device = -1;
    for (const auto& value : given_)
      changed(value, [&](const at::Tensor& tensor) {
        if (device < 0 && on_device(tensor)) device = tensor.device().index();
        return tensor;
      });
    for (const auto& value : given_)
      if (device < 0 && value.isDevice()) device = index_of(value.toDevice());
    return device < 0 ? current_device() : device;
  }
  bool writes(size_t n) const {
    const auto* alias = schema_.arguments()[n].alias_info();
    return alias && alias->isWrite();
  }
  bool writes_tensor(size_t n) const { return writes(n) && given_[n].isTensor() && given_[n].toTensor().defined(); }
  // The argument that a result is, or -1.
  long argument_of(const c10::Argument& result) const {
    if (!result.alias_info()) return -1;
    for (size_t n = 0; n < given_.size(); ++n)
      if (writes(n) && schema_.arguments()[n].alias_info()->beforeSets() == result.alias_info()->beforeSets())
        return long(n);
    return -1;
  }
  // An argument for a kernel elsewhere.  A generator becomes one of the CPU, with a seed that is drawn now.
  c10::IValue argument(size_t n, c10::DeviceType target) const {
    const auto& value = given_[n];
    if (value.isDevice()) return c10::Device(target);
    if (schema_.arguments()[n].type()->str().find("Generator") == std::string::npos) return value;
    if (target != c10::kCPU) return c10::IValue();
    auto seed = draw(value.isNone() ? default_generator(device_) : value.toGenerator());
    return at::Generator(at::make_generator<at::CPUGeneratorImpl>(seed));
  }
  Values arguments(c10::DeviceType target, const Change& change) const {
    Values out;
    for (size_t n = 0; n < given_.size(); ++n) out.push_back(changed(argument(n, target), change));
    return out;
  }
  // Find the shapes of the results without their data; false if they depend on it, or nothing is known of them.
  bool shapes_known() {
    metas_ = arguments(c10::kMeta, as_meta);
    shapes_ = metas_;
    c10::WarningUtils::WarningHandlerGuard quiet(&g_silent);
    try {
      op_.callBoxed(&shapes_);
    } catch (const std::exception&) {  // the kernel itself says what is wrong
      return false;
    }
    return std::all_of(shapes_.begin(), shapes_.end(), [](const c10::IValue& value) {
      return value.isTensor() || value.isTensorList() || value.isNone();
    });
  }
  Values run_in_stream() {
    for (size_t n = 0; n < given_.size(); ++n) {
      if (!writes_tensor(n)) continue;
      const auto& meta = metas_[n].toTensor();
      const auto& tensor = given_[n].toTensor();
      if (tensor.sizes() != meta.sizes()) change_layout(tensor, meta.sizes(), meta.strides(), tensor.storage_offset());
    }
    Values kernel = arguments(c10::kCPU, as_kernel_sees), results = new_results();
    stream_->submit([op = op_, kernel, finish = copies_to(results)]() mutable {
      at::AutoDispatchBelowADInplaceOrView below;
      c10::WarningUtils::WarningHandlerGuard quiet(&g_silent);
      op.callBoxed(&kernel);
      finish(kernel);
    });
    return results;
  }
  // Wait, and ask the kernel, as CUDA does for `nonzero`.  What the kernel writes may get another size, so the kernel
  // has it in memory of its own.
  Values run_now() {
    stream_->synchronize();
    Values kernel = arguments(c10::kCPU, as_kernel_sees);
    std::vector<std::pair<size_t, at::Tensor>> written;
    for (size_t n = 0; n < given_.size(); ++n)
      if (writes_tensor(n)) {
        written.emplace_back(n, kernel[n].toTensor().clone());
        kernel[n] = written.back().second;
      }
    op_.callBoxed(&kernel);
    for (const auto& [n, from] : written) {
      at::Tensor to = given_[n].toTensor();
      if (to.sizes() != from.sizes()) change_layout(to, from.sizes(), from.strides(), to.storage_offset());
      copy(to, from, true);
    }
    shapes_ = kernel;
    Values results = new_results();
    stream_->submit([kernel, finish = copies_to(results)] {
      at::AutoDispatchBelowADInplaceOrView below;
      finish(kernel);
    });
    return results;
  }
  // The results on the device: arguments that are written, or memory that is taken here.
  Values new_results() const {
    Values results;
    for (size_t n = 0; n < schema_.returns().size(); ++n) {
      long from = argument_of(schema_.returns()[n]);
      results.push_back(from >= 0 ? given_[size_t(from)] : changed(shapes_[n], [&](const at::Tensor& shape) {
        auto options = shape.options().device(c10::Device(type(), c10::DeviceIndex(device_)));
        return at::empty_strided(shape.sizes(), shape.strides(), options);
      }));
    }
    return results;
  }
  // A function that copies what the kernel made to the results on the device.
  std::function<void(const Values&)> copies_to(const Values& results) const {
    std::vector<std::pair<size_t, c10::IValue>> targets;
    for (size_t n = 0; n < results.size(); ++n)
      if (argument_of(schema_.returns()[n]) < 0) targets.emplace_back(n, changed(results[n], kernel_view));
    return [targets](const Values& made) {
      for (const auto& [n, to] : targets) {
        if (to.isTensor() && to.toTensor().defined()) to.toTensor().copy_(made[n].toTensor());
        if (!to.isTensorList()) continue;
        for (size_t i = 0; i < to.toTensorList().size(); ++i)
          to.toTensorList().get(i).copy_(made[n].toTensorList().get(i));
      }
    };
  }
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  check_launch();
  const size_t count = op.schema().arguments().size();
  auto results = Call(op, Values(stack->end() - long(count), stack->end())).run();
  torch::jit::drop(*stack, count);
  for (auto& result : results) stack->push_back(std::move(result));
}

// Backends outside of torch find convolutions under names of their own.
c10::OperatorHandle named(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }
void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) { fallback(named("aten::convolution"), stack); }
void convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  int64_t channels = stack->at(stack->size() - 10).toTensor().size(1);
  stack->insert(stack->end() - 7, c10::IValue(std::vector<int64_t>{channels}));  // `bias_sizes`, which is missing
  fallback(named("aten::convolution_backward"), stack);
}
}  // namespace

void register_fallback() {
  auto key = type() == c10::kCUDA ? c10::DispatchKey::CUDA : c10::DispatchKey::PrivateUse1;
  static torch::Library all(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
  all.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  static torch::Library aten(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  aten.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  aten.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

}  // namespace sim
