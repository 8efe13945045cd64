// What does Python use of the device?
#include <ATen/Context.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>

#include "process_group.h"

namespace {
c10::Device device_at(int device) { return {sim::type(), c10::DeviceIndex(device)}; }
const c10::impl::DeviceGuardImplInterface& guard() { return *c10::impl::getDeviceGuardImpl(sim::type()); }
void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  using release = py::call_guard<py::gil_scoped_release>;
  m.attr("NUM_DEVICES") = sim::NUM_DEVICES;
  m.def("install", &sim::install, py::arg("as_cuda"));
  m.def("initialize", [] { at::globalContext().lazyInitDevice(sim::type()); });  // what `is_pinned` asks for
  m.def("stop", &sim::stop, release());

  m.def("current_device", &sim::current_device);
  m.def("exchange_device", [](int device) { return int(guard().exchangeDevice(device_at(device)).index()); });
  m.def("maybe_exchange_device", [](int device) {
    int before = sim::current_device();
    guard().uncheckedSetDevice(device_at(device));
    return before;
  });
  m.def("current_stream", [](int device) { return sim::current(device)->id; });
  m.def("set_stream", [](int device, int64_t id) {
    guard().exchangeStream(c10::Stream(c10::Stream::UNSAFE, device_at(device), id));
  });
  m.def("synchronize", &sim::synchronize, release());
  m.def("has_context", &sim::entered);
  m.def("forked", &sim::forked);

  m.def("configure", &sim::configure, py::arg("seed"), py::arg("max_delay_us"));
  m.def("hold", [](int device, int64_t id, bool held) { sim::stream(device, id)->hold(held); });
  m.def("sleep", [](int device, int64_t id, int64_t us) { sim::stream(device, id)->sleep(us); });
  m.def("waited_us", &sim::waited_us);
  m.def("fail_copy", &sim::fail_copy);
  m.def("refuse_allocation", &sim::refuse_allocation);
  m.def("refuse_registration", &sim::refuse_registration);
  m.def("forget_errors", &sim::forget_errors);
  m.def("check", &sim::check_launch);

  m.def("limit", &sim::limit);
  m.def("reset_peak", &sim::reset_peak);
  m.def("usage", [](int device) {
    auto used = sim::usage(device);
    return std::make_tuple(used.now, used.peak, used.limit);
  });
  m.def("host_register", [](uintptr_t address, size_t nbytes) {
    sim::enter(sim::current_device());
    return sim::host_register(pointer(address), nbytes);
  });
  m.def("host_unregister", [](uintptr_t address) { return sim::host_unregister(pointer(address)); });
  m.def("resize", [](const at::Tensor& tensor, size_t nbytes) { sim::resize_storage(tensor.storage(), nbytes); });

  m.def("generator", &sim::default_generator);
  m.def("register_timer", &sim::register_timer);
  m.def("process_group", &sim::process_group);
}
