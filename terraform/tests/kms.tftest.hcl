# The real provider with keys that open nothing: it renders every policy while planning, offline.
provider "aws" {
  region                      = "eu-west-1"
  access_key                  = "fake"
  secret_key                  = "fake"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_region_validation      = true
  skip_requesting_account_id  = true
}

override_data {
  target = data.aws_caller_identity.current
  values = { account_id = "111122223333" }
}

# ARNs that a plan does not know yet, so that what refers to them can be compared.
override_resource {
  target          = aws_iam_policy.access["reader"]
  override_during = plan
  values          = { arn = "arn:aws:iam::111122223333:policy/reader" }
}

override_resource {
  target          = aws_iam_policy.access["writer"]
  override_during = plan
  values          = { arn = "arn:aws:iam::111122223333:policy/writer" }
}

override_resource {
  target          = aws_iam_policy.access["cleaner"]
  override_during = plan
  values          = { arn = "arn:aws:iam::111122223333:policy/cleaner" }
}

override_resource {
  target          = aws_kms_key.data_keys
  override_during = plan
  values = {
    arn    = "arn:aws:kms:eu-west-1:111122223333:key/66666666-7777-8888-9999-000000000000"
    key_id = "66666666-7777-8888-9999-000000000000"
    policy = "" # KMS's default
  }
}

override_resource {
  target          = aws_iam_policy.data_keys
  override_during = plan
  values          = { arn = "arn:aws:iam::111122223333:policy/data-keys" }
}

run "kms" {
  command = plan

  variables {
    name        = "cache"
    kms_key_arn = "arn:aws:kms:eu-west-1:111122223333:key/11111111-2222-3333-4444-555555555555"
  }

  assert {
    condition = [for rule in aws_s3_bucket_server_side_encryption_configuration.this.rule : {
      algorithm  = rule.apply_server_side_encryption_by_default[0].sse_algorithm
      key        = rule.apply_server_side_encryption_by_default[0].kms_master_key_id
      bucket_key = rule.bucket_key_enabled
    }] == [{ algorithm = "aws:kms", key = var.kms_key_arn, bucket_key = true }]
    error_message = "encryption must be with the key, and a bucket key"
  }

  assert {
    condition = [for statement in jsondecode(aws_s3_bucket_policy.this.policy).Statement : statement if !endswith(statement.Sid, "Tls")] == [
      {
        Sid       = "DenyWrongEncryption"
        Effect    = "Deny"
        Principal = "*"
        Action    = "s3:PutObject"
        Resource  = "arn:aws:s3:::cache/*"
        Condition = {
          Null            = { "s3:x-amz-server-side-encryption" = "false" }
          StringNotEquals = { "s3:x-amz-server-side-encryption" = "aws:kms" }
        }
      },
      {
        Sid       = "DenyWrongKey"
        Effect    = "Deny"
        Principal = "*"
        Action    = "s3:PutObject"
        Resource  = "arn:aws:s3:::cache/*"
        Condition = {
          Null            = { "s3:x-amz-server-side-encryption-aws-kms-key-id" = "false" }
          StringNotEquals = { "s3:x-amz-server-side-encryption-aws-kms-key-id" = "arn:aws:kms:eu-west-1:111122223333:key/11111111-2222-3333-4444-555555555555" }
        }
      },
      {
        Sid       = "DenyKmsWithoutKey"
        Effect    = "Deny"
        Principal = "*"
        Action    = "s3:PutObject"
        Resource  = "arn:aws:s3:::cache/*"
        Condition = {
          Null = {
            "s3:x-amz-server-side-encryption"                = "false"
            "s3:x-amz-server-side-encryption-aws-kms-key-id" = "true"
          }
        }
      },
      {
        Sid       = "DenyCustomerKeys"
        Effect    = "Deny"
        Principal = "*"
        Action    = "s3:PutObject"
        Resource  = "arn:aws:s3:::cache/*"
        Condition = { Null = { "s3:x-amz-server-side-encryption-customer-algorithm" = "false" } }
      },
    ]
    error_message = "bucket policy: ${aws_s3_bucket_policy.this.policy}"
  }

  assert {
    condition     = length(jsondecode(aws_s3_bucket_policy.this.policy).Statement) == 6
    error_message = "bucket policy: ${aws_s3_bucket_policy.this.policy}"
  }

  assert {
    condition = [for access in ["reader", "writer"] : jsondecode(aws_iam_policy.access[access].policy).Statement[2]] == [
      {
        Sid       = "Key"
        Effect    = "Allow"
        Action    = "kms:Decrypt"
        Resource  = "arn:aws:kms:eu-west-1:111122223333:key/11111111-2222-3333-4444-555555555555"
        Condition = { StringEquals = { "kms:ViaService" = "s3.eu-west-1.amazonaws.com" } }
      },
      {
        Sid       = "Key"
        Effect    = "Allow"
        Action    = ["kms:GenerateDataKey", "kms:Decrypt"]
        Resource  = "arn:aws:kms:eu-west-1:111122223333:key/11111111-2222-3333-4444-555555555555"
        Condition = { StringEquals = { "kms:ViaService" = "s3.eu-west-1.amazonaws.com" } }
      },
    ]
    error_message = "the key must be usable through S3 and in no other way"
  }

  assert {
    condition     = [for access in ["reader", "writer"] : length(jsondecode(aws_iam_policy.access[access].policy).Statement)] == [3, 3]
    error_message = "the policies must hold the key's statement beside the bucket's two"
  }
}

# A key for s3kv's own encryption, beside the bucket's, which has nothing to do with it.
run "data_keys" {
  command = plan

  variables {
    name           = "cache"
    cleaner        = true
    encryption_key = true
    settings       = { encryption = "aes-gcm", encryption_keys_file = "/etc/s3kv/keys/keys" }
  }

  assert {
    condition     = [for key in aws_kms_key.data_keys : [key.enable_key_rotation, key.deletion_window_in_days]] == [[true, 30]]
    error_message = "there must be one key, which rotates, and is not gone at once"
  }

  assert {
    condition     = [for alias in aws_kms_alias.data_keys : [alias.name, alias.target_key_id]] == [["alias/cache", "66666666-7777-8888-9999-000000000000"]]
    error_message = "the key must have the bucket's name"
  }

  assert {
    condition = [for access in ["reader", "writer", "cleaner"] : jsondecode(aws_iam_policy.access[access].policy).Statement[2]] == [
      for access in ["reader", "writer", "cleaner"] : {
        Sid      = "DataKeys"
        Effect   = "Allow"
        Action   = "kms:Decrypt"
        Resource = "arn:aws:kms:eu-west-1:111122223333:key/66666666-7777-8888-9999-000000000000"
      }
    ]
    error_message = "engines must be able to decrypt data keys, and nothing else"
  }

  assert {
    condition     = [for access in ["reader", "writer", "cleaner"] : length(jsondecode(aws_iam_policy.access[access].policy).Statement)] == [3, 3, 3]
    error_message = "the policies must hold the key's statement beside the bucket's two"
  }

  assert {
    condition = jsondecode(aws_iam_policy.data_keys[0].policy).Statement == [{
      Sid      = "MakeDataKeys"
      Effect   = "Allow"
      Action   = "kms:GenerateDataKeyWithoutPlaintext"
      Resource = "arn:aws:kms:eu-west-1:111122223333:key/66666666-7777-8888-9999-000000000000"
    }]
    error_message = "who makes data keys must not be able to read them: ${aws_iam_policy.data_keys[0].policy}"
  }

  assert {
    condition     = [output.encryption_key_arn, output.encryption_key_alias, output.data_keys_policy_arn] == ["arn:aws:kms:eu-west-1:111122223333:key/66666666-7777-8888-9999-000000000000", "alias/cache", "arn:aws:iam::111122223333:policy/data-keys"]
    error_message = "the caller must be told the key and the policy"
  }

  assert {
    condition     = [for rule in aws_s3_bucket_server_side_encryption_configuration.this.rule : rule.apply_server_side_encryption_by_default[0].sse_algorithm] == ["AES256"]
    error_message = "the bucket's own encryption must stay as it is"
  }
}
