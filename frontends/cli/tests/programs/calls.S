/* Calls: one way of entering the kernel for each macro; own_syscalls.rs has the scan's verdict on each. */
#ifdef FIRST
    /* At the beginning of the code, outside any known function: a load whose distant offset has the bytes of a call. */
    .section .init, "ax"
    sub $8, %rsp
    .byte 0x48, 0x8b, 0x05, 0x75, 0x0f, 0x05, 0x00
    ret
#endif
    .text
    .globl f
    .type f, @function
f:
#ifndef NO_UNWINDING
    .cfi_startproc
#endif
#ifdef PLAIN
    mov $186, %eax
    syscall
#endif
#ifdef PREFIXES
    mov $3, %eax
    rex.W syscall
    mov $186, %eax
    .byte 0xf3, 0x48
    syscall
#endif
#ifdef ZERO
    xor %eax, %eax
    mov $1, %edi
    syscall
#endif
#ifdef TWO
    mov $202, %eax
    test %edi, %edi
    jz 1f
    syscall
1:  mov $426, %eax
    lea 8(%rsp), %rsi
    syscall
#endif
#ifdef REGISTER
    mov %edi, %eax
    syscall
#endif
#ifdef JUMPED_OVER
    mov $3, %eax
    test %edi, %edi
    jz 1f
    mov $186, %eax
1:  syscall
#endif
#ifdef JUMPED_FROM_ELSEWHERE
    mov $186, %eax
inside:
    syscall
#endif
#ifdef TABLE
    lea table(%rip), %rdx
    jmp *%rdx
table:
    mov $186, %eax
    nop
    syscall
#endif
#ifdef CALLED_BETWEEN
    mov $186, %eax
    call g
    syscall
#endif
#ifdef PART
    mov $186, %eax
    mov $3, %al
    syscall
#endif
#ifdef INSIDE
    mov $0x050f, %eax
    lea 0x050f(%rip), %rdx
#endif
#ifdef NO_UNWINDING
    mov %rdi, %rax
    syscall
#endif
#ifdef OLD_GATE
    mov $6, %eax
    int $0x80
#endif
    ret
#ifndef NO_UNWINDING
    .cfi_endproc
#endif
    .size f, . - f

#ifdef DATA_BETWEEN_FUNCTIONS
    /* Like the tables of hand-written ciphers: no instruction here could set a system call number. */
    .fill 64, 1, 0xf1
    .byte 0x0f, 0x05
    .fill 64, 1, 0xf1
#endif

#ifdef CODE_BETWEEN_FUNCTIONS
    .fill 64, 1, 0xf1
    mov %rdi, %rax
    mov %rsi, %rdi
    mov %rdx, %rsi
    mov %rcx, %rdx
    mov %r8, %r10
    mov %r9, %r8
    mov 8(%rsp), %r9
#ifdef PREFIXED
    rex.W
#endif
    syscall
    ret
#endif

    .globl g
    .type g, @function
g:
    .cfi_startproc
#ifdef JUMPED_FROM_ELSEWHERE
    mov $3, %eax
    jmp inside
#endif
    ret
    .cfi_endproc
    .size g, . - g
    .section .note.GNU-stack, "", @progbits
