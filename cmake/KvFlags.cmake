# Language level, warnings, hardening and sanitizers for everything in the tree.
set(CMAKE_C_STANDARD 17)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS ON)
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)

add_compile_options(-Wall -Wextra -Wshadow -Wvla -Wundef -Wpointer-arith -Wformat=2
                    -fno-common -fno-omit-frame-pointer
                    $<$<COMPILE_LANGUAGE:C>:-Wstrict-prototypes>
                    $<$<COMPILE_LANGUAGE:C>:-Wmissing-prototypes>)
if(KV_WERROR)
  add_compile_options(-Werror)
endif()
add_compile_definitions(_GNU_SOURCE)

# Asserts stay on except in Release: NDEBUG for the sake of benchmarks would hide our own bugs.
set(CMAKE_C_FLAGS_RELEASE "-O2 -g -DNDEBUG")
set(CMAKE_C_FLAGS_RELWITHDEBINFO "-O2 -g") # what the sanitizers and fuzzers build
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g")
if(KV_SANITIZE MATCHES "address" AND NOT KV_FUZZ) # compiles in two thirds of the time; fuzzers run longer than they compile
  set(CMAKE_C_FLAGS_RELWITHDEBINFO "-O1 -g")
  set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O1 -g")
endif()
# Hardening of what is installed. KV_HARDENING lists the options; src/kvx/cuda passes them on to nvcc's host compiler.
set(KV_HARDENING)
if(CMAKE_BUILD_TYPE STREQUAL "Release" AND NOT KV_SANITIZE)
  include(CheckCCompilerFlag)
  include(CheckCSourceCompiles)
  set(CMAKE_REQUIRED_FLAGS "-O2 -Werror -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3") # libc warns where it has no level 3
  check_c_source_compiles("#include <string.h>\nint main(void) { return 0; }" KV_HAS_FORTIFY_3)
  unset(CMAKE_REQUIRED_FLAGS)
  if(KV_HAS_FORTIFY_3)
    list(APPEND KV_HARDENING -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3)
  else()
    list(APPEND KV_HARDENING -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2)
  endif()
  foreach(option stack-protector-strong stack-clash-protection cf-protection) # the last: CET, of x86 alone
    string(MAKE_C_IDENTIFIER "KV_HAS_${option}" has)
    check_c_compiler_flag(-f${option} ${has})
    if(${has})
      list(APPEND KV_HARDENING -f${option})
    endif()
  endforeach()
  add_compile_options(${KV_HARDENING})
  add_link_options(-Wl,-z,relro,-z,now)
endif()
include(CheckPIESupported)
check_pie_supported() # clang needs an explicit -pie

if(KV_SANITIZE)
  add_compile_options(-fsanitize=${KV_SANITIZE} -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${KV_SANITIZE})
  # clang calls NULL + 0 an error, which it and gcc define and C2y allows (N3322): empty spans have no address here.
  # The address sanitizer sees the accesses that sums beyond an object would lead to.
  if(CMAKE_C_COMPILER_ID MATCHES "Clang" AND KV_SANITIZE MATCHES "undefined")
    add_compile_options(-fno-sanitize=pointer-overflow)
  endif()
endif()
if(KV_FUZZ)
  add_compile_options(-fsanitize=fuzzer-no-link) # coverage, which guides the fuzzer
endif()
if(KV_COVERAGE)
  add_compile_options(--coverage -O0)
  add_link_options(--coverage)
endif()
