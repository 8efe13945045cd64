// The table of files, which a large checkpoint has in its index: one msgpack array.
#include <algorithm>

#include "reader.h"

namespace reader {
namespace {

constexpr int64_t kTableNbytes = 256 << 20;
constexpr int64_t kTableFiles = 1 << 22;
constexpr size_t kNamesNbytes = 65536;

class Msgpack {
 public:
  explicit Msgpack(const Bytes& bytes) : bytes_(bytes) {}

  bool done() const { return at_ == bytes_.size(); }
  size_t array() { return head(0x90, 0xF0, 0xDC, 2); }
  Bytes binary() { return take(head(0, 0, 0xC4, 3)); }

  std::string text() {
    std::string text = take(byte(at_) >= 0xD9 && byte(at_) <= 0xDB ? head(0, 0, 0xD9, 3) : head(0xA0, 0xE0, 0, 0));
    require(is_utf8(text), "the table of files has text that is not UTF-8");
    return text;
  }

 private:
  uint8_t byte(size_t at) const {
    require(at < bytes_.size(), "the table of files is cut short");
    return uint8_t(bytes_[at]);
  }

  // Returns a length: that in the byte itself, or in `kinds` codes from `first` on, of growing width.
  size_t head(uint8_t fixed, uint8_t mask, uint8_t first, int kinds) {
    uint8_t code = byte(at_++);
    if (mask != 0 && (code & mask) == fixed) return code & uint8_t(~mask);
    int kind = code - first;
    require(kinds > 0 && kind >= 0 && kind < kinds, "the table of files has an unexpected value");
    size_t width = size_t(1) << (kinds == 2 ? kind + 1 : kind), length = 0;
    for (size_t n = 0; n < width; ++n) length = length << 8 | byte(at_++);
    return length;
  }

  Bytes take(size_t nbytes) {
    require(nbytes <= bytes_.size() - at_, "the table of files is cut short");
    at_ += nbytes;
    return bytes_.substr(at_ - nbytes, nbytes);
  }

  const Bytes& bytes_;
  size_t at_ = 0;
};

template <typename Number>
std::vector<Number> numbers(const Bytes& bytes) {
  require(bytes.size() % sizeof(Number) == 0, "the table of files has a part of a number");
  std::vector<Number> found(bytes.size() / sizeof(Number));
  for (size_t n = 0; n < bytes.size(); ++n) {
    auto& number = found[n / sizeof(Number)];
    number = Number(uint64_t(number) | uint64_t(uint8_t(bytes[n])) << n % sizeof(Number) * 8);
  }
  return found;
}

std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> found(1);
  for (char c : text) {
    if (c == '\n') {
      found.emplace_back();
    } else {
      found.back() += c;
    }
  }
  return found;
}

}  // namespace

void add_table(Manifest& manifest, const Bytes& index) {
  const Table& place = manifest.table;
  require(place.nbytes <= kTableNbytes && place.num_files <= kTableFiles && place.num_files <= place.nbytes / 17,
          "the table of files is too large");
  require(place.start <= int64_t(index.size()) - place.nbytes, "the table of files is not inside the index");
  Bytes bytes = index.substr(size_t(place.start), size_t(place.nbytes));
  Msgpack in(bytes);
  require(in.array() == 7, "the table of files does not have seven entries");
  std::vector<std::string> paths = lines(in.text());
  auto sizes = numbers<int64_t>(in.binary());
  auto digests = numbers<uint64_t>(in.binary());
  auto items = numbers<int32_t>(in.binary()), places = numbers<int32_t>(in.binary());
  std::vector<size_t> widths(in.array());
  size_t names_nbytes = 0;
  for (size_t& width : widths) {
    std::set<std::string> names;
    width = in.array();
    for (size_t n = 0; n < width; ++n) {
      std::string name = in.text();
      names_nbytes += name.size();
      require(names.insert(name).second, "a coordinate has a name twice");
    }
  }
  auto coordinates = numbers<int64_t>(in.binary());
  require(in.done() && names_nbytes <= kNamesNbytes, "the table of files has too many names, or other bytes");
  size_t count = paths.size();
  require(count == size_t(place.num_files) && sizes.size() == count && items.size() == count &&
              places.size() == count,
          "the entries of the table of files differ in length");
  size_t at = 0, used = 0;
  int64_t total = 0;
  for (size_t n = 0; n < count; ++n) {
    require(sizes[n] >= 0 && sizes[n] <= INT64_MAX - total, "a size in the table of files is impossible");
    total += sizes[n];
    size_t blocks = size_t(sizes[n] / manifest.block_nbytes + (sizes[n] % manifest.block_nbytes != 0));
    require(blocks <= digests.size() - at, "the table of files lacks digests");
    require(items[n] >= -1 && items[n] < int64_t(manifest.items.size()) && places[n] >= -1 &&
                places[n] < int64_t(widths.size()) && (items[n] >= 0 || places[n] < 0),
            "the table of files names an item or a coordinate that does not exist");
    used += places[n] >= 0 ? widths[size_t(places[n])] : 0;
    check_path(paths[n]);
    require(paths[n] != "manifest.json", "the table of files lists the manifest");
    File file{paths[n], sizes[n], {digests.begin() + long(at), digests.begin() + long(at + blocks)}};
    at += blocks;
    require(manifest.files.emplace(paths[n], std::move(file)).second, paths[n] + " is listed twice");
    if (items[n] >= 0) manifest.blobs.insert(paths[n]);
  }
  require(at == digests.size() && used == coordinates.size() && total == place.files_nbytes,
          "the totals of the table of files differ");
}

}  // namespace reader
