// The index, a Parquet file, and the headers of data files, which repeat it.
#include <arrow/buffer.h>
#include <arrow/io/memory.h>
#include <arrow/memory_pool.h>
#include <parquet/column_reader.h>
#include <parquet/exception.h>
#include <parquet/file_reader.h>
#include <parquet/schema.h>

#include <algorithm>
#include <memory>
#include <tuple>

#include "reader.h"

namespace reader {
namespace {

struct Column {
  const char* path;
  bool is_text, is_list;
};

constexpr Column kColumns[] = {
    {"item", true, false},
    {"fqn", true, false},
    {"dtype", true, false},
    {"shape.list.element", false, true},
    {"offsets.list.element", false, true},
    {"lengths.list.element", false, true},
    {"file", true, false},
    {"start", false, false},
    {"nbytes", false, false},
};

// The values of all rows of a column: texts, numbers, or lists of numbers.
struct Values {
  std::vector<std::string> texts;
  Numbers numbers;
  std::vector<Numbers> lists;
};

// Memory for the pages of the index.  None has more than 64 MiB, so a sound index needs less than this.
class PageMemory : public arrow::ProxyMemoryPool {
 public:
  PageMemory() : ProxyMemoryPool(arrow::default_memory_pool()) {}

  using MemoryPool::Allocate;
  using MemoryPool::Reallocate;

  arrow::Status Allocate(int64_t size, int64_t alignment, uint8_t** out) override {
    if (!fits(size)) return arrow::Status::OutOfMemory("a page is too large");
    return ProxyMemoryPool::Allocate(size, alignment, out);
  }

  arrow::Status Reallocate(int64_t before, int64_t size, int64_t alignment, uint8_t** data) override {
    if (!fits(size - before)) return arrow::Status::OutOfMemory("a page is too large");
    return ProxyMemoryPool::Reallocate(before, size, alignment, data);
  }

 private:
  bool fits(int64_t more) { return more <= (256 << 20) - bytes_allocated(); }
};

void check_schema(const parquet::SchemaDescriptor& schema) {
  require(schema.num_columns() == int(std::size(kColumns)), "the index has other columns");
  for (int n = 0; n < schema.num_columns(); ++n) {
    const Column& column = kColumns[n];
    const parquet::ColumnDescriptor* found = schema.Column(n);
    require(found->path()->ToDotString() == column.path &&
                found->physical_type() == (column.is_text ? parquet::Type::BYTE_ARRAY : parquet::Type::INT64) &&
                (!column.is_text || found->logical_type()->is_string()) &&
                found->max_definition_level() == column.is_list && found->max_repetition_level() == column.is_list,
            std::string("the index has another column in the place of ") + column.path);
  }
}

// Compares the claims of the footer with the size of the file; `PageMemory` bounds the pages.
void check_limits(const Bytes& file, const parquet::FileMetaData& footer) {
  auto size = int64_t(file.size());
  int64_t values = 0, unpacked = 0;
  require(footer.size() <= 1 << 20, "the footer of the index is too large");
  require(footer.num_rows() <= std::min<int64_t>((1 << 17) + 16 * size, 1 << 26), "the index has too many rows");
  require(footer.num_row_groups() <= 4096, "the index has too many row groups");
  for (int group = 0; group < footer.num_row_groups(); ++group) {
    auto rows = footer.RowGroup(group);
    require(rows->num_rows() <= 1 << 20, "a row group of the index has too many rows");
    for (int n = 0; n < rows->num_columns(); ++n) {
      auto column = rows->ColumnChunk(n);
      require(column->num_values() >= 0 && column->num_values() <= 1 << 30, "the index has too many values");
      require(column->total_uncompressed_size() >= 0 && column->total_uncompressed_size() < INT64_MAX >> 20,
              "the index unfolds to too many bytes");
      values += column->num_values();
      unpacked += column->total_uncompressed_size();
      require(column->compression() == parquet::Compression::UNCOMPRESSED ||
                  column->compression() == parquet::Compression::ZSTD,
              "a column of the index has an unknown compression");
    }
  }
  require(values <= std::min<int64_t>((1 << 21) + 256 * size, 1 << 30), "the index has too many values");
  require(unpacked <= (64 << 20) + 1024 * size, "the index unfolds to too many bytes");
}

void append(Values& values, const Column& column, parquet::ColumnReader& reader, int64_t rows) {
  constexpr int64_t kBatch = 4096;
  std::vector<int16_t> defined(kBatch), repeated(kBatch);
  int64_t levels = 0, found = 0;
  while (reader.HasNext()) {
    if (column.is_text) {
      std::vector<parquet::ByteArray> batch(kBatch);
      static_cast<parquet::ByteArrayReader&>(reader).ReadBatch(kBatch, nullptr, nullptr, batch.data(), &found);
      for (int64_t n = 0; n < found; ++n) {
        values.texts.emplace_back(reinterpret_cast<const char*>(batch[n].ptr), batch[n].len);
        require(is_utf8(values.texts.back()), "the index has text that is not UTF-8");
      }
      continue;
    }
    std::vector<int64_t> batch(kBatch);
    auto& numbers = static_cast<parquet::Int64Reader&>(reader);
    if (!column.is_list) {
      numbers.ReadBatch(kBatch, nullptr, nullptr, batch.data(), &found);
      values.numbers.insert(values.numbers.end(), batch.begin(), batch.begin() + found);
      continue;
    }
    levels = numbers.ReadBatch(kBatch, defined.data(), repeated.data(), batch.data(), &found);
    for (int64_t level = 0, n = 0; level < levels; ++level) {
      if (repeated[level] == 0) values.lists.emplace_back();
      require(!values.lists.empty(), "a list of the index begins in its middle");
      if (defined[level] == 1) values.lists.back().push_back(batch[n++]);
    }
  }
  require(int64_t(values.texts.size() + values.numbers.size() + values.lists.size()) == rows,
          std::string("the index has another number of values in ") + column.path);
}

// Returns whether chunks tile a shape: as many elements, and no two chunks with a common element.
bool tile(const Tensor& tensor) {
  int64_t left = num_elements(tensor.shape);
  for (const Chunk& chunk : tensor.chunks) {
    int64_t elements = num_elements(chunk.lengths);
    if (elements > left) return false;
    left -= elements;
  }
  if (left != 0) return false;
  // Chunks are sorted by offsets, so only those that begin before the end of another can meet it.
  const auto& chunks = tensor.chunks;
  for (size_t a = 0; !tensor.shape.empty() && a < chunks.size(); ++a) {
    for (size_t b = a + 1; b < chunks.size() && chunks[b].offsets[0] < chunks[a].offsets[0] + chunks[a].lengths[0];
         ++b) {
      bool meet = true;
      for (size_t d = 0; d < tensor.shape.size(); ++d)
        meet &= std::max(chunks[a].offsets[d], chunks[b].offsets[d]) <
                std::min(chunks[a].offsets[d] + chunks[a].lengths[d], chunks[b].offsets[d] + chunks[b].lengths[d]);
      if (meet) return false;
    }
  }
  return true;
}

void check_chunk(const Manifest& manifest, const Tensor& tensor, const Chunk& chunk) {
  std::string name = tensor.item + "/" + tensor.fqn;
  size_t ndim = tensor.shape.size();
  require(ndim <= 32 && chunk.offsets.size() == ndim && chunk.lengths.size() == ndim,
          name + " has a box of other dimensions than its shape");
  for (size_t d = 0; d < ndim; ++d)
    require(tensor.shape[d] >= 0 && chunk.offsets[d] >= 0 && chunk.lengths[d] >= 0 &&
                chunk.offsets[d] <= tensor.shape[d] && chunk.lengths[d] <= tensor.shape[d] - chunk.offsets[d],
            name + " has a box outside its shape");
  int64_t size = item_nbytes(tensor.dtype), most = size;
  for (int64_t length : tensor.shape)
    require(!__builtin_mul_overflow(most, std::max<int64_t>(length, 1), &most), name + " is too large");
  require((num_elements(chunk.lengths) == 0) == (num_elements(tensor.shape) == 0), name + " has an empty box");
  require(chunk.nbytes == num_elements(chunk.lengths) * size, name + " has a chunk of another size");
  auto file = manifest.files.find(chunk.file);
  require(file != manifest.files.end(), name + " lies in a file that is not listed");
  require(chunk.start >= 0 && chunk.start % size == 0 && chunk.nbytes <= file->second.nbytes &&
              chunk.start <= file->second.nbytes - chunk.nbytes,
          name + " does not lie inside its file");
}

void check_extents(const std::vector<Tensor>& tensors) {
  std::set<std::tuple<std::string, int64_t, int64_t>> extents;
  for (const Tensor& tensor : tensors)
    for (const Chunk& chunk : tensor.chunks)
      if (chunk.nbytes > 0) extents.emplace(chunk.file, chunk.start, chunk.nbytes);
  const std::tuple<std::string, int64_t, int64_t>* before = nullptr;
  for (const auto& extent : extents) {
    if (before != nullptr && std::get<0>(*before) == std::get<0>(extent))
      require(std::get<1>(*before) + std::get<2>(*before) <= std::get<1>(extent), "two extents overlap");
    before = &extent;
  }
}

}  // namespace

int64_t num_elements(const Numbers& shape) {
  int64_t product = 1;
  for (int64_t length : shape) product *= length;
  return product;
}

std::vector<Tensor> read_index(const Checkpoint& checkpoint) {
  const Bytes& bytes = checkpoint.index();
  Values columns[std::size(kColumns)];
  int64_t rows = 0;
  PageMemory memory;
  try {
    auto data = reinterpret_cast<const uint8_t*>(bytes.data());
    auto source = std::make_shared<arrow::io::BufferReader>(
        std::make_shared<arrow::Buffer>(data, int64_t(bytes.size())));
    auto file = parquet::ParquetFileReader::Open(source, parquet::ReaderProperties(&memory));
    check_schema(*file->metadata()->schema());
    check_limits(bytes, *file->metadata());
    for (int group = 0; group < file->metadata()->num_row_groups(); ++group) {
      auto reader = file->RowGroup(group);
      rows += reader->metadata()->num_rows();
      for (size_t n = 0; n < std::size(kColumns); ++n)
        append(columns[n], kColumns[n], *reader->Column(int(n)), rows);
    }
  } catch (const parquet::ParquetException& error) {
    throw Refused(std::string("the index is not a readable Parquet file: ") + error.what());
  }
  std::vector<Tensor> tensors;
  for (size_t row = 0; row < size_t(rows); ++row) {
    Tensor tensor{columns[0].texts[row], columns[1].texts[row], columns[2].texts[row], columns[3].lists[row], {}};
    Chunk chunk{columns[4].lists[row], columns[5].lists[row], columns[6].texts[row], columns[7].numbers[row],
                columns[8].numbers[row]};
    check_chunk(checkpoint.manifest(), tensor, chunk);
    bool more = !tensors.empty() && tensors.back().item == tensor.item && tensors.back().fqn == tensor.fqn;
    if (more) {
      const Tensor& before = tensors.back();
      require(before.dtype == tensor.dtype && before.shape == tensor.shape, "rows of a tensor differ");
      require(before.chunks.back().offsets < chunk.offsets, "the rows of the index are not sorted");
    } else {
      require(tensors.empty() || std::tie(tensors.back().item, tensors.back().fqn) < std::tie(tensor.item, tensor.fqn),
              "the rows of the index are not sorted");
      tensors.push_back(tensor);
    }
    tensors.back().chunks.push_back(chunk);
  }
  for (const Tensor& tensor : tensors)
    require(tile(tensor), "the chunks of " + tensor.item + "/" + tensor.fqn + " do not tile it");
  check_extents(tensors);
  return tensors;
}

}  // namespace reader
