// The files of a checkpoint: the manifest, the table of files, and bytes with their digests.
#define XXH_INLINE_ALL
#include <arrow/vendored/xxhash/xxhash.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "reader.h"

namespace fs = std::filesystem;

namespace reader {
namespace {

constexpr uintmax_t kManifestNbytes = 256 << 20;
constexpr int64_t kIndexNbytes = 1 << 30;
constexpr size_t kTailNbytes = 29;

bool is_hex(const std::string& text, size_t digits) {
  return text.size() == digits && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

std::vector<uint64_t> as_digests(const Bytes& bytes) {
  std::vector<uint64_t> digests(bytes.size() / 8);
  for (size_t n = 0; n < bytes.size(); ++n) digests[n / 8] |= uint64_t(uint8_t(bytes[n])) << n % 8 * 8;
  return digests;
}

// Padded, canonical base64.
Bytes from_base64(const std::string& text) {
  static const std::string letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  require(text.size() % 4 == 0, "digests are not base64");
  Bytes out;
  for (size_t at = 0; at < text.size(); at += 4) {
    uint32_t bits = 0;
    size_t padding = 0;
    for (size_t n = 0; n < 4; ++n) {
      char c = text[at + n];
      size_t value = letters.find(c);
      bool pads = c == '=' && n >= 2 && at + 4 == text.size() && (n == 3 || text[at + 3] == '=');
      require(value != std::string::npos || pads, "digests are not base64");
      padding += pads;
      bits = bits << 6 | (pads ? 0 : uint32_t(value));
    }
    for (size_t n = 0; n < 3 - padding; ++n) out += char(bits >> (16 - 8 * n));
    require((bits & ((1u << 8 * padding) - 1)) == 0, "digests are not canonical base64");
  }
  require(out.size() % 8 == 0, "digests have a part of a digest");
  return out;
}

void add_file(Manifest& manifest, File file) {
  check_path(file.path);
  int64_t blocks = (file.nbytes + manifest.block_nbytes - 1) / manifest.block_nbytes;
  if (file.nbytes > INT64_MAX - manifest.block_nbytes) blocks = -1;
  require(int64_t(file.digests.size()) == blocks, file.path + " has another number of digests than blocks");
  require(file.path != "manifest.json", "the manifest lists itself");
  std::string path = file.path;
  require(manifest.files.emplace(path, std::move(file)).second, path + " is listed twice");
}

void check_coordinate(const Json& coordinate) {
  require(coordinate.kind == Json::object, "a coordinate is not an object");
  size_t nbytes = 2;
  for (size_t n = 0; n < coordinate.names.size(); ++n) {
    coordinate.members[n].as_integer(INT64_MIN);
    nbytes += quoted(coordinate.names[n]).size() + 1 + coordinate.members[n].text.size() + (n > 0);
  }
  require(nbytes <= 1024, "a coordinate has more than 1,024 bytes");
}

void add_files(Manifest& manifest, const Json& document) {
  for (const Json& file : document.at("files").as_list()) {
    File found{file.at("path").as_text(), file.at("nbytes").as_integer(0), {}};
    found.digests = as_digests(from_base64(file.at("digests").as_text()));
    add_file(manifest, std::move(found));
  }
  std::set<std::string> items(manifest.items.begin(), manifest.items.end());
  for (const Json& blob : document.at("blobs").as_list()) {
    const std::string& path = blob.at("path").as_text();
    require(items.count(blob.at("item").as_text()) == 1, path + " belongs to an unknown item");
    require(manifest.files.count(path) == 1 && path != manifest.index, path + " is not a listed blob file");
    require(manifest.blobs.insert(path).second, path + " is a blob file twice");
    const Json& coordinate = blob.at("coordinate");
    if (coordinate.kind != Json::null) check_coordinate(coordinate);
  }
  require(manifest.files.count(manifest.index) == 1, "the index is not a listed file");
}

void add_features(Manifest& manifest, const Json& document) {
  std::set<std::string> required;
  for (const Json& word : document.at("requires").as_list()) {
    require(word.as_text() == "file_table" || word.text == "moved", "this needs a newer reader: " + word.text);
    required.insert(word.text);
  }
  const Json *table = document.find("table"), *moved = document.find("moved_to");
  require((table != nullptr) == (required.count("file_table") == 1), "table and requires do not agree");
  require((moved != nullptr) == (required.count("moved") == 1), "moved_to and requires do not agree");
  if (moved != nullptr) {
    manifest.moved_to = moved->as_text();
    require(manifest.moved_to.size() <= 4096 && !manifest.moved_to.empty(), "moved_to is too long");
  }
  if (table != nullptr) {
    manifest.has_table = true;
    manifest.table = {table->at("start").as_integer(0), table->at("nbytes").as_integer(1),
                      table->at("num_files").as_integer(1), table->at("files_nbytes").as_integer(0)};
    require(document.at("blobs").as_list().empty() && document.at("files").as_list().size() == 1,
            "a manifest with a table lists files itself");
  }
}

}  // namespace

uint64_t digest(const void* data, size_t nbytes) { return XXH3_64bits(data, nbytes); }

void check_path(const std::string& path) {
  require(path.size() <= 1024 && is_utf8(path), "a path is too long, or not text");
  size_t from = 0;
  for (size_t to = 0; to <= path.size(); ++to) {
    if (to < path.size() && path[to] != '/') {
      uint8_t c = path[to];
      require(c >= 0x20 && c != 0x7F && c != '\\' && c != ':', "unsafe path: " + quoted(path));
      continue;
    }
    std::string part = path.substr(from, to - from);
    require(!part.empty() && part != "." && part != ".." && part.size() <= 200,
            "unsafe path: " + quoted(path));
    from = to + 1;
  }
}

// Returns the place of a regular file, which no link below the root leads to.
static fs::path place_of(const std::string& root, const std::string& path) {
  fs::path place = root;
  for (const fs::path& part : fs::path(path)) {
    place /= part;
    require(!fs::is_symlink(fs::symlink_status(place)), place.string() + " is a link");
  }
  require(fs::is_regular_file(place), place.string() + " is missing, or not a file");
  return place;
}

static Bytes read_range(const fs::path& place, int64_t start, int64_t nbytes) {
  Bytes bytes(size_t(nbytes), '\0');
  std::ifstream file(place, std::ios::binary);
  file.seekg(start);
  require(bool(file.read(bytes.data(), nbytes)), place.string() + " cannot be read");
  return bytes;
}

Manifest read_manifest(const std::string& root) {
  fs::path place = place_of(root, "manifest.json");
  require(fs::file_size(place) <= kManifestNbytes, "the manifest is too large");
  Bytes bytes = read_range(place, 0, int64_t(fs::file_size(place)));
  size_t end = bytes.size() - std::min(bytes.size(), kTailNbytes);
  std::string tail = bytes.substr(end);
  require(tail.size() == kTailNbytes && tail.compare(0, 11, ",\"digest\":\"") == 0 &&
              tail.compare(27, 2, "\"}") == 0 && is_hex(tail.substr(11, 16), 16),
          "the manifest does not end in its digest");
  require(std::stoull(tail.substr(11, 16), nullptr, 16) == digest(bytes.data(), end),
          "the manifest is damaged: its digest differs");
  require(bytes[0] == '{', "the manifest does not begin with an object");
  Json document = parse_json(bytes, true);
  require(document.at("format").as_text() == "reknit", "the manifest is of another format");
  require(document.at("format_version").as_integer(1) == 1, "this needs a newer reader");
  Manifest manifest;
  manifest.write_id = document.at("write_id").as_text();
  require(is_hex(manifest.write_id, 32), "the write id is not one");
  if (const Json* generation = document.find("generation")) generation->as_integer(0);
  const Json& step = document.at("step");
  require(step.kind == Json::null || step.as_integer(0) >= 0, "the step is not one");
  require(document.at("created").kind == Json::number, "the time is not a number");
  require(document.at("uses_pickle").kind == Json::boolean, "uses_pickle is neither true nor false");
  for (const char* name : {"origin", "metadata"})
    require(document.at(name).kind == Json::object, std::string(name) + " is not an object");
  std::set<std::string> seen;
  for (const Json& item : document.at("items").as_list()) {
    require(item.as_text().size() <= 4096, "the name of an item is too long");
    require(seen.insert(item.text).second, "an item is listed twice");
    manifest.items.push_back(item.text);
  }
  manifest.block_nbytes = document.at("block_nbytes").as_integer(4096);
  int64_t block = manifest.block_nbytes;
  require(block <= 1 << 30 && (block & (block - 1)) == 0, "block_nbytes is not a power of two");
  manifest.index = document.at("index").as_text();
  add_features(manifest, document);
  add_files(manifest, document);
  return manifest;
}

Checkpoint::Checkpoint(const std::string& root) : root_(root), manifest_(read_manifest(root)) {
  if (!manifest_.moved_to.empty()) root_ = manifest_.moved_to;
  require(root_.find("://") == std::string::npos, "the files are at " + root_ + ", and this reads local files only");
  int64_t nbytes = manifest_.files.at(manifest_.index).nbytes;
  require(nbytes <= kIndexNbytes, "the index is too large");
  index_ = read(manifest_.index, 0, nbytes);
  if (manifest_.has_table) add_table(manifest_, index_);
}

Bytes Checkpoint::read(const std::string& path, int64_t start, int64_t nbytes) const {
  const File& file = manifest_.files.at(path);
  require(start >= 0 && nbytes >= 0 && start <= file.nbytes - nbytes, path + " is too short");
  int64_t block = manifest_.block_nbytes, first = start / block, last = (start + nbytes + block - 1) / block;
  fs::path place = place_of(root_, path);
  require(int64_t(fs::file_size(place)) == file.nbytes, place.string() + " has another size");
  int64_t from = first * block, to = std::min(last * block, file.nbytes);
  Bytes bytes = read_range(place, from, std::max<int64_t>(to - from, 0));
  for (int64_t n = first; n < last; ++n) {
    size_t at = size_t((n - first) * block);
    require(digest(bytes.data() + at, std::min<size_t>(size_t(block), bytes.size() - at)) == file.digests[n],
            place.string() + " is damaged: block " + std::to_string(n) + " has another digest");
  }
  return bytes.substr(std::min(size_t(start - from), bytes.size()), size_t(nbytes));
}

void Checkpoint::check(const std::string& path) const {
  int64_t block = manifest_.block_nbytes, nbytes = manifest_.files.at(path).nbytes;
  read(path, 0, 0);
  for (int64_t at = 0; at < nbytes; at += block) read(path, at, std::min(block, nbytes - at));
}

}  // namespace reader
