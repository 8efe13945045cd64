// Which operators have code of their own?  Allocation, views, fills and copies.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <atomic>

#include "device.h"

namespace sim {
namespace {
c10::DispatchKeySet key() {
  return c10::DispatchKeySet(type() == c10::kCUDA ? c10::DispatchKey::CUDA : c10::DispatchKey::PrivateUse1);
}
at::Tensor over(void* base, const at::Tensor& like) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), like.storage().nbytes(),
                       c10::DataPtr(base, c10::Device(c10::kCPU)), nullptr, false);
  auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                      like.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) out._set_conj(true);
  if (like.is_neg()) out._set_neg(true);
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) out.unsafeGetTensorImpl()->set_wrapped_number(true);
  return out;
}
}  // namespace

at::Tensor kernel_view(const at::Tensor& tensor) {
  const void* base = tensor.storage().data();
  return over(base ? kernel_address(base) : nullptr, tensor);
}
at::Tensor host_view(const at::Tensor& tensor) { return over(const_cast<void*>(tensor.storage().data()), tensor); }

// ---------------------------------------------------------------- allocation
namespace {
at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(type())));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), device_allocator(), key(),
                                   c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(type())));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           device_allocator(), key(), c10::dtype_or_default(dtype));
}

// ---------------------------------------------------------------- views, and changes of layout
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  std::optional<int64_t> plain;
  if (offset) plain = offset->expect_int();
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), plain);
}
at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
c10::DimVector row_major(at::IntArrayRef size) {
  c10::DimVector strides(size.size(), 1);
  for (size_t d = size.size(); d-- > 1;) strides[d - 1] = strides[d] * std::max<int64_t>(size[d], 1);
  return strides;
}
const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto plain = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() != plain) change_layout(self, plain, row_major(plain), self.storage_offset());
  return self;
}
at::Tensor& set_range(at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                      c10::SymIntArrayRef stride) {
  auto plain = C10_AS_INTARRAYREF_SLOW(size);
  auto strides = stride.empty() ? row_major(plain) : c10::DimVector(C10_AS_INTARRAYREF_SLOW(stride));
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  change_layout(self, plain, strides, offset.expect_int());
  return self;
}
at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  int64_t numel = int64_t(storage.nbytes() / self.dtype().itemsize());
  return set_range(self, std::move(storage), 0, c10::SymIntArrayRef(c10::SymInt(numel)), {});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_range(self, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}
}  // namespace

void change_layout(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, int64_t offset) {
  int64_t last = offset;
  bool any = true;
  for (size_t d = 0; d < size.size(); ++d) {
    any = any && size[d];
    last += (size[d] - 1) * stride[d];
  }
  size_t nbytes = any ? size_t(last + 1) * self.dtype().itemsize() : 0;
  if (nbytes > self.storage().nbytes()) resize_storage(self.storage(), nbytes);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
}

// ---------------------------------------------------------------- fills and single values
namespace {
at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  at::AutoDispatchBelowADInplaceOrView below;
  check_launch();
  if (!self.numel()) return self;
  current(self.device().index())->submit([to = kernel_view(self), value]() mutable {
    at::AutoDispatchBelowADInplaceOrView below;
    to.fill_(value);
  });
  return self;
}
at::Tensor& zero(at::Tensor& self) { return fill(self, 0); }
at::Scalar local_scalar(const at::Tensor& self) {
  current(self.device().index())->synchronize();
  at::AutoDispatchBelowADInplaceOrView below;
  return at::_local_scalar_dense(kernel_view(self));
}

// ---------------------------------------------------------------- copies
std::atomic<int> g_copies_left{-1};

// Does the device copy to or from the host at once?  For that the host's bytes are in one piece of pinned memory.
struct Host {
  explicit Host(const at::Tensor& tensor)
      : data(tensor.const_data_ptr()), nbytes(tensor.nbytes()), pin(pinned(data, nbytes)) {
    TORCH_CHECK(pin.whole || !pin.part, "simulated device: invalid argument: a copy of ", nbytes,
                " bytes that crosses the border of pinned memory");
  }
  void check() const {
    if (pin.whole && pinned(data, nbytes).number != pin.number)
      throw std::runtime_error("a copy to or from host memory that is pinned no longer");
  }
  const void* data;
  size_t nbytes;
  Pin pin;
};
void submit_copy(Stream* stream, at::Tensor to, at::Tensor from, std::function<void()> before = nullptr) {
  int left = g_copies_left.load();
  if (left >= 0) g_copies_left = left - 1;
  stream->submit([=, fails = left == 0]() mutable {
    at::AutoDispatchBelowADInplaceOrView below;
    if (before) before();
    if (fails) throw std::runtime_error("a copy failed, as a test wanted it");
    to.copy_(from);
  });
}
// On the device, from one current stream to the other.
void copy_on_device(at::Tensor& self, const at::Tensor& source) {
  Stream* stream = current(source.device().index());
  Stream* other = current(self.device().index());
  if (stream != other) stream->wait(other->mark());
  submit_copy(stream, kernel_view(self), kernel_view(source));
  if (stream != other) other->wait(stream->mark());
}
// Contiguous bytes of one dtype.
void copy_from_host(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  Stream* stream = current(self.device().index());
  Host host(source);
  if (host.pin.whole) {
    submit_copy(stream, kernel_view(self), host_view(source), [host] { host.check(); });
    host_used_on(host.data, stream);
  } else {
    submit_copy(stream, kernel_view(self), source.detach().clone());  // staged: its bytes are those of now
  }
  if (!non_blocking) stream->synchronize();
}
void copy_to_host(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  Stream* stream = current(source.device().index());
  Host host(self);
  submit_copy(stream, host_view(self), kernel_view(source), [host] { host.check(); });
  if (host.pin.whole) host_used_on(host.data, stream);
  if (!non_blocking || !host.pin.whole) stream->synchronize();
}
}  // namespace

void fail_copy(int after) { g_copies_left = after; }

// As torch copies between CUDA and the host: what crosses is contiguous and of one dtype.  The dtype changes on the
// device if the copy is asynchronous, on the host if not.  A target that is not contiguous is filled by the device,
// and that is not waited for.
at::Tensor& copy(at::Tensor& self, const at::Tensor& given, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  check();
  if (!self.numel()) return self;
  at::Tensor source = given.sizes() == self.sizes() ? given : given.expand(self.sizes());
  if (on_device(self) && on_device(source)) {
    copy_on_device(self, source);
    return self;
  }
  const bool to_host = on_device(source);
  const auto contiguous = at::MemoryFormat::Contiguous;
  bool converts = (to_host == non_blocking) && self.scalar_type() != source.scalar_type();  // before it crosses
  if (converts) source = source.to(self.scalar_type());
  bool same = self.scalar_type() == source.scalar_type() && self.is_conj() == source.is_conj();
  at::Tensor target = self;
  if (!self.is_contiguous() || !same) target = at::empty_like(self, self.options().dtype(source.scalar_type()), contiguous);
  source = source.resolve_conj().resolve_neg().contiguous();
  if (to_host) copy_to_host(target, source, non_blocking);
  else copy_from_host(target, source, non_blocking);
  if (!target.is_same(self)) self.copy_(target, non_blocking);
  return self;
}

namespace {
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& self, bool non_blocking) {
  at::Tensor out = self;
  return copy(out, source, non_blocking);
}
at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& self) {
  at::Tensor out = self;
  if (out.sizes() != source.sizes()) out.resize_(source.sizes());
  return copy(out, source, false);
}
void record_stream(at::Tensor& self, c10::Stream stream) { device_used_on(self.storage().data(), of(stream)); }
}  // namespace

void register_kernels() {
  static torch::Library m(torch::Library::IMPL, "aten", key().highestPriorityTypeId(), __FILE__, __LINE__);
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("view", view);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_range);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("fill_.Scalar", fill);
  m.impl("zero_", zero);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("copy_", copy);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("record_stream", record_stream);
}

}  // namespace sim
