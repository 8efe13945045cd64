// What memory does the simulated device have, and which host memory can it copy to?  Nothing here uses torch.
#pragma once
#include <cstddef>

#include "streams.h"

namespace sim {

// Device memory is mapped twice.  Tensors carry addresses of a mapping without any access; kernels use the other.
// Freed memory is used again at once, in the order of the stream that took it, and filled with a pattern first.
void* device_alloc(int device, size_t nbytes, Stream* stream);  // nullptr: out of memory
void device_free(void* pointer);
void device_used_on(const void* pointer, Stream* stream);  // another stream uses it: not free before that stream is there
void* kernel_address(const void* pointer);
int device_of(const void* pointer);  // -1: not device memory
struct Usage {
  size_t now, peak, limit;
};
Usage usage(int device);
void reset_peak(int device);
void limit(int device, size_t nbytes);
void refuse_allocation(int after);  // the allocation after so many others finds no memory; -1: none

// Pinned host memory: allocated here, or registered.  Copies to and from it run when the stream comes to them.
void* host_alloc(size_t nbytes);
void host_free(void* pointer);  // stays until the copies that use it have ended
void host_used_on(const void* pointer, Stream* stream);
struct Pin {
  bool whole;       // all of the range lies in one piece of pinned memory
  bool part;        // some of it does
  uint64_t number;  // of that piece: 0 is none
};
Pin pinned(const void* pointer, size_t nbytes);
int host_register(void* pointer, size_t nbytes);  // 0, or the number of an error, as the driver of CUDA gives it
int host_unregister(void* pointer);
void refuse_registration(int after);

}  // namespace sim
