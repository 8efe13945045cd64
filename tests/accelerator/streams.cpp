#include "streams.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <random>
#include <stdexcept>
#include <thread>

namespace sim {
namespace {
using Clock = std::chrono::steady_clock;
using Waited = std::shared_ptr<std::atomic<int64_t>>;

constexpr size_t POOL = 32;  // streams of a device

std::atomic<uint64_t> g_seed{0};
std::atomic<int> g_max_delay_us{0};

const Waited& waited() {
  thread_local Waited mine = std::make_shared<std::atomic<int64_t>>(0);
  return mine;
}
}  // namespace

int64_t waited_us() { return waited()->load(); }

// ---------------------------------------------------------------- contexts
namespace {
std::atomic<bool> g_entered[NUM_DEVICES];
std::atomic<bool> g_used{false};
std::atomic<bool> g_forked{false};
}  // namespace

void enter(int device) {
  if (g_forked) throw std::runtime_error("simulated device: a forked child cannot use the device of its parent");
  if (!g_used.exchange(true)) pthread_atfork(nullptr, nullptr, [] { g_forked = true; });
  g_entered[device] = true;
}
bool entered(int device) { return !g_forked && g_entered[device]; }
bool forked() { return g_forked; }

// ---------------------------------------------------------------- errors
namespace {
std::mutex g_error_lock;
std::string g_error, g_left_error;
}  // namespace

void fail(const std::string& message) {
  std::lock_guard<std::mutex> guard(g_error_lock);
  if (g_error.empty()) g_error = message;
}
void leave_error(const std::string& message) {
  std::lock_guard<std::mutex> guard(g_error_lock);
  g_left_error = message;
}
void check() {
  std::lock_guard<std::mutex> guard(g_error_lock);
  if (!g_error.empty()) throw std::runtime_error("CUDA error: simulated, earlier work failed: " + g_error);
}
void check_launch() {
  check();
  std::lock_guard<std::mutex> guard(g_error_lock);
  if (g_left_error.empty()) return;
  std::string message;
  message.swap(g_left_error);
  throw std::runtime_error("simulated device: an earlier call left an error behind: " + message);
}
void forget_errors() {
  std::lock_guard<std::mutex> guard(g_error_lock);
  g_error.clear();
  g_left_error.clear();
}

// ---------------------------------------------------------------- marks
struct Mark::State {
  Stream* stream;
  uint64_t place;  // how many entries of the queue come before it
  mutable std::mutex lock;
  std::condition_variable changed;
  bool done = false;
  Clock::time_point reached_at;

  void finish() {
    std::lock_guard<std::mutex> guard(lock);
    done = true;
    reached_at = Clock::now();
    changed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> guard(lock);
    changed.wait(guard, [&] { return done; });
  }
};
bool Mark::done() const {
  std::lock_guard<std::mutex> guard(state_->lock);
  return state_->done;
}
double Mark::reached_at_ms() const {
  std::lock_guard<std::mutex> guard(state_->lock);
  return std::chrono::duration<double, std::milli>(state_->reached_at.time_since_epoch()).count();
}

// ---------------------------------------------------------------- streams
namespace {
// One entry of a queue: a job, a wait for a mark of any stream, a sleep, or a mark that is reached here.
struct Entry {
  Stream::Job job{};
  bool delayed = false;
  std::optional<Mark> mark{};
  int64_t sleep_us = 0;
  Stream::Job reach{};
};
}  // namespace

struct Stream::State {
  mutable std::mutex lock;
  std::condition_variable changed;
  std::deque<Entry> queue;
  uint64_t submitted = 0, begun = 0;
  uint64_t hurried = 0;  // the host waits for the entries up to this one, so they do not sleep
  Waited hurried_for;
  std::optional<Mark> awaited;  // what the running entry waits for
  bool busy = false, held = false, ended = false;
  std::mt19937_64 random;
  std::thread thread;

  void push(Entry entry) {
    std::lock_guard<std::mutex> guard(lock);
    queue.push_back(std::move(entry));
    ++submitted;
    changed.notify_all();
  }
  // Let the entries up to `place` sleep no longer, nor the entries of other streams that they wait for.
  void hurry(uint64_t place, const Waited& who) {
    std::optional<Mark> next;
    {
      std::lock_guard<std::mutex> guard(lock);
      if (place <= hurried) return;
      hurried = place;
      hurried_for = who;
      changed.notify_all();
      if (awaited && begun <= hurried) next = awaited;
    }
    if (next) next->state_->stream->state_->hurry(next->state_->place, who);
  }
  void run() {
    std::unique_lock<std::mutex> guard(lock);
    for (;;) {
      changed.wait(guard, [&] { return (!queue.empty() && !held) || (ended && queue.empty()); });
      if (queue.empty()) return;
      Entry entry = std::move(queue.front());
      queue.pop_front();
      ++begun;
      busy = true;
      if (entry.sleep_us) sleep(guard, entry.sleep_us);
      if (entry.mark) await(guard, *entry.mark);
      if (entry.job) work(guard, entry);
      busy = false;
      if (entry.reach) entry.reach();  // whoever waited finds the stream idle
      changed.notify_all();
    }
  }
  void sleep(std::unique_lock<std::mutex>& guard, int64_t microseconds) {
    auto until = Clock::now() + std::chrono::microseconds(microseconds);
    changed.wait_until(guard, until, [&] { return begun <= hurried || ended; });
    auto left = std::chrono::duration_cast<std::chrono::microseconds>(until - Clock::now()).count();
    if (begun <= hurried && left > 0) *hurried_for += left;
  }
  void await(std::unique_lock<std::mutex>& guard, const Mark& mark) {
    awaited = mark;
    bool urgent = begun <= hurried;
    Waited who = hurried_for;
    guard.unlock();
    if (urgent) mark.state_->stream->state_->hurry(mark.state_->place, who);
    mark.state_->wait();
    guard.lock();
    awaited.reset();
  }
  void work(std::unique_lock<std::mutex>& guard, Entry& entry) {
    int most = g_max_delay_us;
    int delay = entry.delayed && most ? int(random() % unsigned(most)) : 0;
    guard.unlock();
    if (delay) usleep(useconds_t(delay));
    try {
      entry.job();
    } catch (const std::exception& error) {
      fail(error.what());
    }
    entry.job = nullptr;  // what the job holds ends here, not under the lock
    guard.lock();
  }
};

Stream::Stream(int device, int64_t id) : device(device), id(id), state_(new State) {
  reseed();
  state_->thread = std::thread([state = state_] { state->run(); });
}
void Stream::submit(Job job, bool delayed) { state_->push(Entry{std::move(job), delayed}); }
void Stream::sleep(int64_t microseconds) { state_->push(Entry{{}, false, {}, std::max<int64_t>(microseconds, 1)}); }
void Stream::wait(const Mark& mark) { state_->push(Entry{{}, false, mark}); }
Mark Stream::mark() {
  Mark mark;
  mark.state_ = std::make_shared<Mark::State>();
  mark.state_->stream = this;
  std::lock_guard<std::mutex> guard(state_->lock);
  mark.state_->place = state_->submitted++;
  state_->queue.push_back(Entry{{}, false, {}, 0, [state = mark.state_] { state->finish(); }});
  state_->changed.notify_all();
  return mark;
}
void Mark::wait() const {
  state_->stream->state_->hurry(state_->place, waited());
  state_->wait();
}
bool Mark::ask() const {
  bool was = done();  // before the sleeps end: otherwise the answer would depend on which thread is quicker
  state_->stream->state_->hurry(state_->place, waited());
  return was;
}
bool Stream::idle() const {
  std::lock_guard<std::mutex> guard(state_->lock);
  return state_->queue.empty() && !state_->busy;
}
void Stream::synchronize() {
  mark().wait();
  check();
}
void Stream::hold(bool held) {
  std::lock_guard<std::mutex> guard(state_->lock);
  state_->held = held;
  state_->changed.notify_all();
}
void Stream::reseed() {
  std::lock_guard<std::mutex> guard(state_->lock);
  state_->random.seed(g_seed * 1000003 + uint64_t(device) * 1009 + uint64_t(id));
}
void Stream::end() {
  {
    std::lock_guard<std::mutex> guard(state_->lock);
    state_->ended = true;
    state_->held = false;
    state_->changed.notify_all();
  }
  if (state_->thread.joinable()) state_->thread.join();
}

// ---------------------------------------------------------------- all streams
namespace {
std::mutex g_streams_lock;
std::vector<Stream*> g_streams[NUM_DEVICES];
size_t g_given[NUM_DEVICES];

Stream* at(int device, int64_t id) {
  auto& all = g_streams[device];
  while (int64_t(all.size()) <= id) all.push_back(new Stream(device, int64_t(all.size())));
  return all[size_t(id)];
}
std::vector<Stream*> streams_of(int device) {
  std::lock_guard<std::mutex> guard(g_streams_lock);
  return g_streams[device];
}
}  // namespace

Stream* stream(int device, int64_t id) {
  enter(device);
  std::lock_guard<std::mutex> guard(g_streams_lock);
  return at(device, id);
}
Stream* new_stream(int device) {
  enter(device);
  std::lock_guard<std::mutex> guard(g_streams_lock);
  return at(device, int64_t(1 + g_given[device]++ % POOL));
}
void synchronize(int device) {
  enter(device);
  for (auto* one : streams_of(device)) one->synchronize();
}
void configure(uint64_t seed, int max_delay_us) {
  g_seed = seed;
  g_max_delay_us = max_delay_us;
  for (int device = 0; device < NUM_DEVICES; ++device)
    for (auto* one : streams_of(device)) one->reseed();
}
void stop() {
  if (g_forked) return;
  for (int device = 0; device < NUM_DEVICES; ++device)
    for (auto* one : streams_of(device)) one->end();
}

}  // namespace sim
