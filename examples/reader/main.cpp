// A second reader of reknit's checkpoints, written from docs/format.md: lists tensors, prints parts, checks bytes.
#include <algorithm>
#include <cstring>
#include <iostream>
#include <tuple>

#include "reader.h"

namespace reader {
namespace {

constexpr const char* kUsage =
    "usage: reader list PATH                          one JSON object a tensor\n"
    "       reader slice PATH ITEM FQN [RANGES]       numbers of a part, as in 0:2,:,3:5; --bytes for its bytes\n"
    "       reader check PATH                         compare every byte with its digest, headers with the index\n";

struct WrongUse : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void list(const Checkpoint& checkpoint) {
  for (const Tensor& tensor : read_index(checkpoint)) {
    std::cout << "{\"item\":" << quoted(tensor.item) << ",\"fqn\":" << quoted(tensor.fqn)
              << ",\"dtype\":" << quoted(tensor.dtype) << ",\"shape\":[";
    for (size_t d = 0; d < tensor.shape.size(); ++d) std::cout << (d ? "," : "") << tensor.shape[d];
    std::cout << "],\"chunks\":" << tensor.chunks.size() << "}\n";
  }
}

// Returns the first element and the length of a range such as 2:5, :5, 2: or : of a dimension.
std::pair<int64_t, int64_t> as_range(const std::string& text, int64_t size) {
  size_t colon = text.find(':');
  if (colon == std::string::npos || text.find_first_not_of("0123456789:") != std::string::npos)
    throw WrongUse("not a range: " + text);
  try {
    int64_t from = colon ? std::stoll(text.substr(0, colon)) : 0;
    int64_t to = colon + 1 < text.size() ? std::stoll(text.substr(colon + 1)) : size;
    from = std::min(from, size);
    return {from, std::max<int64_t>(std::min(to, size) - from, 0)};
  } catch (const std::logic_error&) {
    throw WrongUse("not a range: " + text);
  }
}

// Copies the elements that a chunk and the wanted box have in common.
void copy_common(const Checkpoint& checkpoint, const Tensor& tensor, const Chunk& chunk, const Numbers& offsets,
                 const Numbers& lengths, Bytes& out) {
  size_t ndim = tensor.shape.size();
  auto size = item_nbytes(tensor.dtype);
  Numbers from(ndim), to(ndim);
  for (size_t d = 0; d < ndim; ++d) {
    from[d] = std::max(chunk.offsets[d], offsets[d]);
    to[d] = std::min(chunk.offsets[d] + chunk.lengths[d], offsets[d] + lengths[d]);
    if (from[d] >= to[d]) return;
  }
  auto place = [&](const Numbers& at, const Numbers& first, const Numbers& shape) {
    int64_t number = 0;
    for (size_t d = 0; d < ndim; ++d) number = number * shape[d] + at[d] - first[d];
    return number;
  };
  Numbers last(ndim);
  for (size_t d = 0; d < ndim; ++d) last[d] = to[d] - 1;
  int64_t begin = place(from, chunk.offsets, chunk.lengths), end = place(last, chunk.offsets, chunk.lengths) + 1;
  Bytes bytes = checkpoint.read(chunk.file, chunk.start + begin * size, (end - begin) * size);
  Numbers at = from;
  int64_t run = ndim ? to[ndim - 1] - from[ndim - 1] : 1;
  while (true) {
    std::memcpy(out.data() + place(at, offsets, lengths) * size,
                bytes.data() + (place(at, chunk.offsets, chunk.lengths) - begin) * size, size_t(run * size));
    size_t d = ndim ? ndim - 1 : 0;
    while (d > 0 && ++at[d - 1] == to[d - 1]) --d, at[d] = from[d];
    if (d == 0) return;
  }
}

void slice(const Checkpoint& checkpoint, std::vector<std::string> arguments) {
  auto raw = std::find(arguments.begin(), arguments.end(), "--bytes");
  bool as_bytes = raw != arguments.end();
  if (as_bytes) arguments.erase(raw);
  if (arguments.size() < 2 || arguments.size() > 3) throw WrongUse("slice needs an item and a name");
  std::vector<Tensor> tensors = read_index(checkpoint);
  auto found = std::find_if(tensors.begin(), tensors.end(), [&](const Tensor& tensor) {
    return tensor.item == arguments[0] && tensor.fqn == arguments[1];
  });
  if (found == tensors.end()) throw WrongUse("no such tensor: " + arguments[0] + "/" + arguments[1]);
  Numbers offsets(found->shape.size()), lengths = found->shape;
  std::string ranges = arguments.size() == 3 ? arguments[2] + "," : "";
  for (size_t d = 0, at = 0; at < ranges.size(); ++d) {
    if (d == lengths.size()) throw WrongUse("more ranges than dimensions");
    size_t comma = ranges.find(',', at);
    std::tie(offsets[d], lengths[d]) = as_range(ranges.substr(at, comma - at), found->shape[d]);
    at = comma + 1;
  }
  auto size = item_nbytes(found->dtype);
  Bytes out(size_t(num_elements(lengths) * size), '\0');
  for (const Chunk& chunk : found->chunks) copy_common(checkpoint, *found, chunk, offsets, lengths, out);
  if (as_bytes) {
    std::cout << out;
    return;
  }
  int64_t width = lengths.empty() ? 1 : lengths.back(), count = int64_t(out.size()) / size;
  for (int64_t n = 0; n < count; ++n)
    std::cout << shown_number(found->dtype, out.data() + n * size) << ((n + 1) % width ? ' ' : '\n');
}

void check(const Checkpoint& checkpoint) {
  int64_t nbytes = 0;
  for (const auto& [path, file] : checkpoint.manifest().files) {
    checkpoint.check(path);
    nbytes += file.nbytes;
  }
  std::vector<Tensor> tensors = read_index(checkpoint);
  check_headers(checkpoint, tensors);
  std::cout << "sound: " << tensors.size() << " tensors, " << checkpoint.manifest().files.size() << " files, "
            << nbytes << " bytes\n";
}

int run(const std::vector<std::string>& arguments) {
  if (arguments.size() < 2) throw WrongUse("no command, or no path");
  const std::string& command = arguments[0];
  if (command != "list" && command != "slice" && command != "check") throw WrongUse("no such command: " + command);
  Checkpoint checkpoint(arguments[1]);
  if (command == "list") list(checkpoint);
  if (command == "slice") slice(checkpoint, {arguments.begin() + 2, arguments.end()});
  if (command == "check") check(checkpoint);
  std::cout.flush();
  return std::cout ? 0 : 3;
}

}  // namespace
}  // namespace reader

int main(int argc, char** argv) {
  try {
    return reader::run({argv + 1, argv + argc});
  } catch (const reader::WrongUse& error) {
    std::cerr << "reader: " << error.what() << "\n" << reader::kUsage;
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "reader: " << error.what() << "\n";
    return 1;
  }
}
