// What do the files that use torch share?  The type of the device, the current one, and views of its memory.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "memory.h"

namespace sim {

// The device is one of its own (PrivateUse1), or takes the place of CUDA in a torch that was built without it.
// `install` decides, once in a process.
void install(bool as_cuda);
c10::DeviceType type();
inline bool on_device(const at::Tensor& tensor) { return tensor.device().type() == type(); }

int current_device();          // of this thread
Stream* current(int device);   // stream of this thread
Stream* of(const c10::Stream& stream);
int index_of(c10::Device device);

c10::Allocator* device_allocator();
at::Generator default_generator(int device);
uint64_t draw(at::Generator generator);  // a seed for one kernel

void resize_storage(const c10::Storage& storage, size_t nbytes);
void change_layout(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, int64_t offset);

// CPU tensors over the bytes of a tensor, for kernels.  They hold nothing alive, as a kernel has only addresses.
at::Tensor kernel_view(const at::Tensor& tensor);  // of a tensor on the device
at::Tensor host_view(const at::Tensor& tensor);    // of a tensor on the host
at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking);
void fail_copy(int after);  // the copy after so many others fails; -1: none

void register_kernels();
void register_fallback();

}  // namespace sim
