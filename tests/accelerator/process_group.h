// Which process group do tensors on the device have?  One that runs the collectives of gloo in streams.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "device.h"

namespace sim {

void register_timer();  // DDP asks for one of each type of device
c10::intrusive_ptr<c10d::Backend> process_group(const c10::intrusive_ptr<c10d::Backend>& host, int rank, int size);

}  // namespace sim
