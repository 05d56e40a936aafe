// For safetensors_test.py:  safetensors_tool copy IN OUT · safetensors_tool check FILE…
#include <cstring>
#include <iostream>

#include "core/check.h"
#include "files/tensors_file.h"

int main(int argc, char** argv) {
  using namespace horner;
  if (argc == 4 && std::strcmp(argv[1], "copy") == 0) {
    files::save_tensors(argv[3], files::load_tensors(argv[2]));
    return 0;
  }
  for (int i = 2; i < argc; ++i) try {
      files::safetensors::read(argv[i]);
      std::cout << "fine\n";
    } catch (const Error& e) {
      std::cout << e.what() << "\n";
    }
}
