// What is a stream of the simulated device?  A queue, the thread that works through it, and marks in it.
// Nothing here uses torch.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace sim {

constexpr int NUM_DEVICES = 4;

class Stream;

// A place in a stream, reached once all work before it is done.  An event is a mark.
class Mark {
 public:
  void wait() const;  // on the host
  bool done() const;
  bool ask() const;  // whether it is done; a host that asks is about to wait
  double reached_at_ms() const;

 private:
  friend class Stream;
  struct State;
  std::shared_ptr<State> state_;
};

// Work in order.  Streams live until the process ends.
class Stream {
 public:
  using Job = std::function<void()>;

  Stream(int device, int64_t id);
  void submit(Job job, bool delayed = true);  // delayed: after a time that the seed draws
  void sleep(int64_t microseconds);           // ends early when the host waits for work behind it
  Mark mark();
  void wait(const Mark& mark);  // later jobs run after the mark
  bool idle() const;
  void synchronize();
  void hold(bool held);  // while held, queued work stays queued: a test decides the order
  void reseed();
  void end();

  const int device;
  const int64_t id;

 private:
  friend class Mark;
  struct State;
  State* state_;  // never freed: the thread uses it until the process ends
};

Stream* stream(int device, int64_t id);  // 0 is the default stream
Stream* new_stream(int device);          // from a pool, which begins again at its end
void synchronize(int device);
void configure(uint64_t seed, int max_delay_us);
void stop();  // finish what is queued, and end all threads

// How long, in microseconds of `Stream::sleep`, the calling thread has waited on the host.
int64_t waited_us();

// Contexts.  A device has one once a thread has used it.
void enter(int device);
bool entered(int device);
bool forked();  // in a child of a process that had a context

// Errors.  A job that fails breaks the device: each later call raises its error.
void fail(const std::string& message);
void leave_error(const std::string& message);  // for the next kernel to raise, once
void check();                                  // raise the error of a job that failed
void check_launch();                           // the same, or the error that was left behind
void forget_errors();

}  // namespace sim
