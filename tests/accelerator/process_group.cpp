#include "process_group.h"

#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <map>

namespace sim {
namespace {
using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;
using Work = c10::intrusive_ptr<c10d::Work>;

// As NCCL's: `wait` lets the current stream wait, and not the host.
struct StreamWork final : c10d::Work {
  StreamWork(Stream* on, Tensors outputs) : on_(on), end_(on->mark()), outputs_(std::move(outputs)) {}
  bool isCompleted() override { return end_.done(); }
  bool isSuccess() const override { return true; }
  void synchronize() override { current(on_->device)->wait(end_); }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    c10::Device device(type(), c10::DeviceIndex(on_->device));
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                           std::vector<c10::Device>{device});
    // Whoever waits for the future waits for the stream that is current where it is completed.
    c10::OptionalStreamGuard guard(c10::Stream(c10::Stream::UNSAFE, device, on_->id));
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }
  Stream* on_;
  Mark end_;
  Tensors outputs_;
};

Tensors views(const Tensors& all) {
  Tensors out;
  for (const auto& one : all) out.push_back(kernel_view(one));
  return out;
}
Lists views(const Lists& all) {
  Lists out;
  for (const auto& one : all) out.push_back(views(one));
  return out;
}
Tensors joined(Tensors one, const Tensors& other) {
  one.insert(one.end(), other.begin(), other.end());
  return one;
}
Tensors joined(Tensors one, const Lists& others) {
  for (const auto& other : others) one = joined(std::move(one), other);
  return one;
}

// gloo has no mean: it adds, and the outputs are divided.
template <typename Options, typename Call>
auto reducing(int size, const Options& o, Tensors outputs, Call call) {
  return [=](c10d::Backend& host) mutable {
    auto plain = o;
    bool mean = o.reduceOp == c10d::ReduceOp::AVG;
    if (mean) plain.reduceOp = c10d::ReduceOp::SUM;
    Work work = call(host, plain);
    if (!mean) return work;
    work->wait();
    for (auto& one : outputs) one.div_(size);
    return work;
  };
}

class Group final : public c10d::Backend {
 public:
  Group(c10::intrusive_ptr<c10d::Backend> host, int rank, int size) : Backend(rank, size), host_(std::move(host)) {}
  const std::string getBackendName() const override { return "simccl"; }

  Work broadcast(Tensors& all, const c10d::BroadcastOptions& o) override {
    return queue(all, all, [o, a = views(all)](Backend& host) mutable { return host.broadcast(a, o); });
  }
  Work allreduce(Tensors& all, const c10d::AllreduceOptions& o) override {
    return queue(all, all, reducing(getSize(), o, views(all), [a = views(all)](Backend& host, auto& plain) mutable {
                   return host.allreduce(a, plain);
                 }));
  }
  Work allreduce_coalesced(Tensors& all, const c10d::AllreduceCoalescedOptions& o) override {
    return queue(all, all, reducing(getSize(), o, views(all), [a = views(all)](Backend& host, auto& plain) mutable {
                   return host.allreduce_coalesced(a, plain);
                 }));
  }
  Work reduce(Tensors& all, const c10d::ReduceOptions& o) override {
    return queue(all, all, reducing(getSize(), o, views(all), [a = views(all)](Backend& host, auto& plain) mutable {
                   return host.reduce(a, plain);
                 }));
  }
  Work allgather(Lists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return queue(joined(in, out), out.at(0), [o, to = views(out), from = views(in)](Backend& host) mutable {
      return host.allgather(to, from, o);
    });
  }
  Work _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    return queue({out, in}, {out}, [o, to = kernel_view(out), from = kernel_view(in)](Backend& host) mutable {
      return host._allgather_base(to, from, o);
    });
  }
  Work allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return queue(joined(out, in), out, [o, to = views(out), from = views(in)](Backend& host) mutable {
      return host.allgather_into_tensor_coalesced(to, from, o);
    });
  }
  Work gather(Lists& out, Tensors& in, const c10d::GatherOptions& o) override {
    return queue(joined(in, out), in, [o, to = views(out), from = views(in)](Backend& host) mutable {
      return host.gather(to, from, o);
    });
  }
  Work scatter(Tensors& out, Lists& in, const c10d::ScatterOptions& o) override {
    return queue(joined(out, in), out, [o, from = views(in), to = views(out)](Backend& host) mutable {
      return host.scatter(to, from, o);
    });
  }
  Work _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    return queue({out, in}, {out},
                 reducing(getSize(), o, {kernel_view(out)}, [to = kernel_view(out), from = kernel_view(in)](
                                                     Backend& host, auto& plain) mutable {
                   return host._reduce_scatter_base(to, from, plain);
                 }));
  }
  Work reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    return queue(joined(out, in), out,
                 reducing(getSize(), o, views(out), [to = views(out), from = views(in)](Backend& host, auto& plain) mutable {
                   return host.reduce_scatter_tensor_coalesced(to, from, plain);
                 }));
  }
  Work alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& outs, std::vector<int64_t>& ins,
                     const c10d::AllToAllOptions& o) override {
    return queue({out, in}, {out}, [o, to = kernel_view(out), from = kernel_view(in), outs, ins](
                                       Backend& host) mutable { return host.alltoall_base(to, from, outs, ins, o); });
  }
  Work send(Tensors& all, int to, int tag) override {
    return queue(all, all, [a = views(all), to, tag](Backend& host) mutable { return host.send(a, to, tag); }, 1 + 2 * to);
  }
  Work recv(Tensors& all, int from, int tag) override {
    return queue(all, all, [a = views(all), from, tag](Backend& host) mutable { return host.recv(a, from, tag); },
                 2 + 2 * from);
  }
  Work barrier(const c10d::BarrierOptions& o) override {
    current(current_device())->synchronize();
    return host_->barrier(o);
  }

 private:
  // Queue a collective on a stream of its own, after the work of the current stream.  Sends and receives have streams
  // by their peer, so that one does not wait for the other.
  template <typename Call>
  Work queue(const Tensors& used, Tensors outputs, Call call, int line = 0) {
    check();
    int device = used.at(0).device().index();
    Stream*& stream = streams_[{device, line}];
    if (!stream) stream = new_stream(device);
    stream->wait(current(device)->mark());
    for (const auto& one : used) device_used_on(one.storage().data(), stream);
    stream->submit([call = std::move(call), host = host_]() mutable { call(*host)->wait(); });
    return c10::make_intrusive<StreamWork>(stream, std::move(outputs));
  }
  c10::intrusive_ptr<c10d::Backend> host_;
  std::map<std::pair<int, int>, Stream*> streams_;
};
// Measures nothing: times of this device say nothing.
struct NoTimer final : c10d::Timer {
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
}  // namespace

void register_timer() {
  c10d::TimerRegistry()->Register(type(), [](c10::Device) { return std::unique_ptr<c10d::Timer>(new NoTimer); });
}
c10::intrusive_ptr<c10d::Backend> process_group(const c10::intrusive_ptr<c10d::Backend>& host, int rank, int size) {
  return c10::make_intrusive<Group>(host, rank, size);
}

}  // namespace sim
