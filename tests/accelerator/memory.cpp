#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>

namespace sim {
namespace {
constexpr unsigned char PATTERN = 0xDB;  // a large negative float, not a NaN, which would equal nothing
constexpr size_t ROUND = 512;
constexpr size_t SIZE = size_t(1) << 30;  // of the mappings; pages that are not used take no memory

struct Block {
  char* pointer = nullptr;
  size_t nbytes = 0;
  Stream* stream = nullptr;     // its reuse follows the order of this stream
  std::set<Stream*> used_on{};  // other streams
};

class Memory {
 public:
  std::mutex lock;
  size_t limit = SIZE, now = 0, peak = 0;

  bool has(const void* pointer) const {
    auto* at = static_cast<const char*>(pointer);
    const char* first = seen_;
    return first && at >= first && at < first + SIZE;
  }
  char* kernel_address(const void* pointer) const {
    return kernels_ + (static_cast<const char*>(pointer) - seen_.load());
  }
  // The caller holds the lock from here on.
  void* take(size_t nbytes, Stream* stream) {
    open();
    sweep();
    nbytes = (nbytes + ROUND - 1) / ROUND * ROUND;
    if (now + nbytes > limit) return nullptr;
    char* at = reused(nbytes, stream);
    if (!at) at = fresh(nbytes);
    if (!at) {
      collect();
      at = fresh(nbytes);
    }
    if (!at) return nullptr;
    // The pattern is written when the memory is given out, in the order of the stream, and not when it is freed: until
    // then another stream may read it, and whatever this stream writes next may come after a wait.  FSDP2 relies on it.
    char* memory = kernel_address(at);
    stream->submit([=] { memset(memory, PATTERN, nbytes); }, false);
    peak = std::max(peak, now += nbytes);
    live_[at] = Block{at, nbytes, stream};
    return at;
  }
  void give_back(void* pointer) {
    auto found = live_.find(static_cast<char*>(pointer));
    if (found == live_.end()) return;
    Block block = std::move(found->second);
    live_.erase(found);
    now -= block.nbytes;
    std::vector<Mark> marks;
    for (auto* other : block.used_on) marks.push_back(other->mark());
    block.used_on.clear();
    if (marks.empty()) free_[{block.stream, block.nbytes}].push_back(block.pointer);
    else leaving_.emplace_back(std::move(marks), std::move(block));
  }
  void used_on(const void* pointer, Stream* stream) {
    auto found = live_.find(static_cast<char*>(const_cast<void*>(pointer)));
    if (found != live_.end() && found->second.stream != stream) found->second.used_on.insert(stream);
  }

 private:
  std::atomic<char*> seen_{nullptr};  // the addresses that tensors carry
  char* kernels_ = nullptr;           // the same pages, for kernels
  size_t top_ = 0;
  std::map<char*, Block> live_;
  std::map<std::pair<Stream*, size_t>, std::vector<char*>> free_;  // the last to come is the first to go
  std::vector<std::pair<std::vector<Mark>, Block>> leaving_;       // freed, and in use by other streams
  std::map<char*, size_t> holes_;                                  // free, and in use by no stream

  void open() {
    if (seen_) return;
    int fd = memfd_create("reknit-simulated-device", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, off_t(SIZE))) throw std::runtime_error("simulated device: no memory for it");
    void* kernels = mmap(nullptr, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    void* seen = mmap(nullptr, SIZE, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    close(fd);
    if (seen == MAP_FAILED || kernels == MAP_FAILED) throw std::runtime_error("simulated device: no addresses for it");
    for (void* mapping : {kernels, seen}) madvise(mapping, SIZE, MADV_DONTDUMP);  // a core would have all of it
    kernels_ = static_cast<char*>(kernels);
    seen_ = static_cast<char*>(seen);
  }
  char* reused(size_t nbytes, Stream* stream) {
    auto found = free_.find({stream, nbytes});
    if (found == free_.end() || found->second.empty()) return nullptr;
    char* at = found->second.back();
    found->second.pop_back();
    return at;
  }
  char* fresh(size_t nbytes) {
    for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
      auto [at, length] = *hole;
      if (length < nbytes) continue;
      holes_.erase(hole);
      if (length > nbytes) holes_[at + nbytes] = length - nbytes;
      return at;
    }
    if (top_ + nbytes > SIZE) return nullptr;
    top_ += nbytes;
    return seen_ + (top_ - nbytes);
  }
  void sweep() {
    auto left = std::remove_if(leaving_.begin(), leaving_.end(), [&](auto& one) {
      if (!std::all_of(one.first.begin(), one.first.end(), [](const Mark& mark) { return mark.done(); })) return false;
      free_[{one.second.stream, one.second.nbytes}].push_back(one.second.pointer);
      return true;
    });
    leaving_.erase(left, leaving_.end());
  }
  // Wait for all streams that have free memory, and join it: any stream can have it then.
  void collect() {
    for (auto& [marks, block] : leaving_)
      for (auto& mark : marks) mark.wait();
    sweep();
    for (auto& [key, all] : free_) {
      key.first->mark().wait();
      for (char* at : all) holes_[at] = key.second;
    }
    free_.clear();
    for (auto hole = holes_.begin(); hole != holes_.end();) {
      auto next = std::next(hole);
      if (next != holes_.end() && hole->first + hole->second == next->first) {
        hole->second += next->second;
        holes_.erase(next);
      } else {
        hole = next;
      }
    }
  }
};
Memory g_memory[NUM_DEVICES];
std::atomic<int> g_allocations_left{-1};

// Count down to the call that a test wants refused.
bool refused(std::atomic<int>& left) {
  int before = left.load();
  if (before < 0) return false;
  left = before - 1;
  return before == 0;
}
}  // namespace

void* device_alloc(int device, size_t nbytes, Stream* stream) {
  check();
  if (refused(g_allocations_left)) return nullptr;
  std::lock_guard<std::mutex> guard(g_memory[device].lock);
  return g_memory[device].take(nbytes, stream);
}
void device_free(void* pointer) {
  int device = device_of(pointer);
  if (device < 0 || forked()) return;
  std::lock_guard<std::mutex> guard(g_memory[device].lock);
  g_memory[device].give_back(pointer);
}
void device_used_on(const void* pointer, Stream* stream) {
  int device = device_of(pointer);
  if (device < 0) return;
  std::lock_guard<std::mutex> guard(g_memory[device].lock);
  g_memory[device].used_on(pointer, stream);
}
int device_of(const void* pointer) {
  for (int device = 0; device < NUM_DEVICES; ++device)
    if (g_memory[device].has(pointer)) return device;
  return -1;
}
void* kernel_address(const void* pointer) {
  int device = device_of(pointer);
  if (device < 0) throw std::runtime_error("simulated device: an address outside of its memory");
  return g_memory[device].kernel_address(pointer);
}
Usage usage(int device) {
  std::lock_guard<std::mutex> guard(g_memory[device].lock);
  return {g_memory[device].now, g_memory[device].peak, g_memory[device].limit};
}
void reset_peak(int device) {
  std::lock_guard<std::mutex> guard(g_memory[device].lock);
  g_memory[device].peak = g_memory[device].now;
}
void limit(int device, size_t nbytes) {
  std::lock_guard<std::mutex> guard(g_memory[device].lock);
  g_memory[device].limit = std::min(nbytes, SIZE);
}
void refuse_allocation(int after) { g_allocations_left = after; }

// ---------------------------------------------------------------- pinned host memory
namespace {
constexpr int INVALID_VALUE = 1, NO_MEMORY = 2, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713;  // as CUDA's

struct Piece {
  size_t nbytes;
  bool ours;
  uint64_t number;
  std::vector<Mark> marks{};
};
std::mutex g_pinned_lock;
std::map<char*, Piece> g_pinned;
std::vector<std::pair<char*, Piece>> g_leaving;
uint64_t g_pieces = 0;
std::atomic<int> g_registrations_left{-1};

std::map<char*, Piece>::iterator piece_at(const void* pointer) {
  auto* at = static_cast<char*>(const_cast<void*>(pointer));
  auto next = g_pinned.upper_bound(at);
  if (next == g_pinned.begin()) return g_pinned.end();
  --next;
  return at < next->first + next->second.nbytes ? next : g_pinned.end();
}
bool finished(const Piece& piece) {
  return std::all_of(piece.marks.begin(), piece.marks.end(), [](const Mark& mark) { return mark.done(); });
}
int refused_with(int code, const char* message) {
  leave_error(message);
  return code;
}
}  // namespace

void* host_alloc(size_t nbytes) {
  std::lock_guard<std::mutex> guard(g_pinned_lock);
  auto left = std::remove_if(g_leaving.begin(), g_leaving.end(), [](auto& one) {
    if (!finished(one.second)) return false;
    ::free(one.first);
    return true;
  });
  g_leaving.erase(left, g_leaving.end());
  void* pointer = nullptr;
  nbytes = std::max<size_t>(nbytes, 1);
  if (posix_memalign(&pointer, 4096, nbytes)) return nullptr;
  g_pinned[static_cast<char*>(pointer)] = Piece{nbytes, true, ++g_pieces};
  return pointer;
}
void host_free(void* pointer) {
  if (forked()) return;
  std::lock_guard<std::mutex> guard(g_pinned_lock);
  auto found = g_pinned.find(static_cast<char*>(pointer));
  if (found == g_pinned.end()) return;
  g_leaving.emplace_back(found->first, std::move(found->second));
  g_pinned.erase(found);
}
void host_used_on(const void* pointer, Stream* stream) {
  std::lock_guard<std::mutex> guard(g_pinned_lock);
  auto found = piece_at(pointer);
  if (found == g_pinned.end() || !found->second.ours) return;
  auto& marks = found->second.marks;
  marks.erase(std::remove_if(marks.begin(), marks.end(), [](const Mark& mark) { return mark.done(); }), marks.end());
  marks.push_back(stream->mark());
}
Pin pinned(const void* pointer, size_t nbytes) {
  std::lock_guard<std::mutex> guard(g_pinned_lock);
  auto* last = static_cast<const char*>(pointer) + std::max<size_t>(nbytes, 1) - 1;
  auto begin = piece_at(pointer), end = piece_at(last);
  bool some = begin != g_pinned.end() || end != g_pinned.end();
  bool whole = begin != g_pinned.end() && begin == end;
  return {whole, some, whole ? begin->second.number : 0};
}
int host_register(void* pointer, size_t nbytes) {
  std::lock_guard<std::mutex> guard(g_pinned_lock);
  if (!nbytes) return refused_with(INVALID_VALUE, "invalid argument");
  if (refused(g_registrations_left)) return refused_with(NO_MEMORY, "out of memory");
  auto* at = static_cast<char*>(pointer);
  auto next = g_pinned.lower_bound(at);
  bool overlaps = piece_at(pointer) != g_pinned.end() || (next != g_pinned.end() && next->first < at + nbytes);
  if (overlaps) return refused_with(ALREADY_REGISTERED, "part or all of the requested memory range is already mapped");
  g_pinned[at] = Piece{nbytes, false, ++g_pieces};
  return 0;
}
int host_unregister(void* pointer) {
  std::lock_guard<std::mutex> guard(g_pinned_lock);
  auto found = g_pinned.find(static_cast<char*>(pointer));
  if (found == g_pinned.end() || found->second.ours)
    return refused_with(NOT_REGISTERED, "pointer does not correspond to a registered memory region");
  g_pinned.erase(found);
  return 0;
}
void refuse_registration(int after) { g_registrations_left = after; }

}  // namespace sim
